"""README.md and docs/: their code runs, their links lead somewhere, and what they name is there."""

import argparse
import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import pytest
from mlx.nn.layers.base import Module

import paged_kv
from paged_kv import command_line, embedded_model
from paged_kv.integrations.generation.generate_command import add_generate_parser
from paged_kv.server.options import parsed_server_options
from paged_kv.store.tiered_store import LEAST_SECRET_BYTES
from tests.support.folders import ROOT
from tests.support.vision_zoo import IMAGE, whole_model
from tests.support.zoo import small_model

SITE = sorted((ROOT / "docs").glob("**/*.md"))
DOCUMENTS = [ROOT / "README.md", *SITE]
LINKED = [*DOCUMENTS, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RESULTS = ROOT / "benches" / "results"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w./-]+\.(?:py|h|cpp|cu|metal|html|json|toml|md))(?:::(\w+))?`")
FOLDER = re.compile(
    r"`((?:paged_kv|allocator|kernels|integrations|server|tests|benches|docs)/[a-z_/]*)`"
)
# Words in capitals in a file name are placeholders. The others are users' files.
NOT_OURS = re.compile(r"[A-Z]{3}|(?:snapshot|my_program)\.")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"ci", "docs", "lint", "nvrtc", "test"}


class Block(NamedTuple):
    """A code block of a document; the text block right behind a Python block is its output."""

    document: Path
    line: int
    language: str
    text: str
    output: str | None


def blocks(*languages: str) -> list[Block]:
    """All code blocks in these languages."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if not languages or match[1] in languages:
                line = text.count("\n", 0, match.start()) + 2
                output = OUTPUT.match(text, match.end()) if match[1] == "python" else None
                found.append(Block(document, line, match[1], match[2], output and output[1]))
    return found


def commands() -> Iterator[tuple[str, str]]:
    """Every line of every shell block, with its place."""
    for block in blocks("sh"):
        for at, line in enumerate(block.text.splitlines()):
            if line.strip():
                yield f"{block.document.name}:{block.line + at}", line


def name_of(block: Block) -> str:
    return f"{block.document.name}:{block.line}"


def written_in(language: str) -> list[Path]:
    return list(dict.fromkeys(block.document for block in blocks(language)))


@pytest.fixture
def small_load(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `mlx_lm.load` return a small random model, with the tokenizer of the trained one, where
    another than that is asked for."""
    tokenizer = trained("stdlib-llama")[1]

    def load(name: str) -> tuple[Module, Any]:
        if name == embedded_model():
            return trained("stdlib-llama", mx.bfloat16)  # type: ignore[no-any-return]
        changes = {"vocab_size": tokenizer.vocab_size, "sliding_window": 256}
        return small_model("gemma3_text" if "gemma" in name else "llama", **changes), tokenizer

    monkeypatch.setattr(mlx_lm, "load", load)
    monkeypatch.setattr(mlx_lm.utils, "sharded_load", load)
    for name in (
        "generate",
        "batch_generate",
    ):  # Answers are short unless a document asks for more.
        monkeypatch.setattr(mlx_lm, name, partial(getattr(mlx_lm, name), max_tokens=4))


@pytest.mark.parametrize("document", written_in("python"), ids=lambda path: path.name)
@pytest.mark.slow
@pytest.mark.usefixtures("pages_taken_back")
def test_python_of_a_document_runs_and_prints_what_stands_behind_it(
    document: Path,
    small_load: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    names = vision_names(document, tmp_path, monkeypatch)
    for block in blocks("python"):
        if block.document == document:
            # Keep line numbers, so that an error names the line of the document.
            code = compile("\n" * (block.line - 1) + block.text, str(document), "exec")
            exec(code, names)
            printed = capsys.readouterr().out
            if block.output is not None:
                assert without_backend(printed) == without_backend(block.output)
    for factory in names.values():
        if isinstance(factory, paged_kv.PagedCacheFactory):
            factory.close()


def without_backend(printed: str) -> str:
    """Statistics name the backend, which depends on the machine."""
    return re.sub(r"^(\w+ pages), \w+,", r"\1,", printed, flags=re.MULTILINE)


def vision_names(document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a document about mlx-vlm begins with, which `.ci/check_versions` runs."""
    if "from mlx_vlm import" not in document.read_text(encoding="utf-8"):
        return {}
    pytest.importorskip("mlx_vlm", reason="needs the extra vlm")
    monkeypatch.setattr("mlx_vlm.load", lambda _: (whole_model(), None))
    monkeypatch.setattr("mlx_vlm.generate", lambda *_, **__: None)
    (folder / "cat.png").write_bytes(b"a cat")
    return {"prompt": "What is this?", "tokens": [1, 2, IMAGE, IMAGE, 3]}


@pytest.mark.parametrize("where", dict(commands()))
def test_a_command_is_one_that_there_is(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(dict(commands())[where], comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        assert words.pop(0).partition("=")[0] in variables_of_the_reference()
    require_command(words, monkeypatch)


def require_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails unless `paged-kv` would start with these arguments."""
    match words:
        case ["paged-kv", "server", *options]:
            parsed_server_options(options)
        case ["mlx.launch", *launched]:
            assert "--" in launched, "mlx.launch takes the command's options for its own"
            require_command(launched[launched.index("--") + 1 :], monkeypatch)
        case ["python", "-m", "paged_kv", *arguments]:
            require_command(["paged-kv", *arguments], monkeypatch)
        case ["paged-kv", *arguments]:
            run_parser_only(arguments, monkeypatch)
        case ["./demo", "--real"]:
            assert find_spec("benches.real_models.demo")
        case ["./demo", *arguments]:
            parser = argparse.ArgumentParser()
            add_generate_parser(parser.add_subparsers())
            parser.parse_args(["generate", "--prompt", "", *arguments])
        case ["./test", *_]:
            assert (ROOT / "test").exists()
        case ["pip", "install", what] | ["pip", "install", "-e", what]:
            asked = re.fullmatch(r"\.(?:\[([\w,]+)\])?", what)
            assert asked, what
            assert asked[1] is None or set(asked[1].split(",")) <= EXTRAS.keys()
        case ["mkdocs", "serve"]:
            assert (ROOT / "mkdocs.yml").exists()
        case ["git", "clone", "ADDRESS", folder, "&&", "cd", entered]:
            assert folder == entered == "paged_kv"
        case ["python", "-m", module, *_]:
            assert find_spec(module)
        case ["python", "my_program.py"]:
            pass
        case ["tar" | "rsync", *arguments]:
            assert "~/.cache/paged-kv/pages" in [each.rstrip("/") for each in arguments]
        case ["head", "-c", number, "/dev/urandom", *_]:
            assert int(number) >= LEAST_SECRET_BYTES
        case ["lm_eval", "--model", model, "--tasks", _, "--model_args", arguments]:
            # What `.ci/check_lm_eval` runs.
            assert model == "local-completions"
            names = {each.partition("=")[0] for each in arguments.split(",")}
            assert names == {"model", "base_url", "tokenizer"}
        case ["curl", url, "-d", body]:
            assert url in (
                "http://127.0.0.1:8080/v1/chat/completions",
                "http://127.0.0.1:8000/v1/completions",  # Ray Serve's port
            )
            assert json.loads(body)
        case ["serve", "run", "paged_kv.ray:app", *arguments]:
            pytest.importorskip("ray", reason="needs the extra ray")
            assert import_module("paged_kv.ray").app(dict(each.split("=", 1) for each in arguments))
        case ["serve", "deploy", file]:
            assert (ROOT / file).exists()
        case ["ray", "start", "--head" | "--address=192.168.1.7:6379"]:
            pass
        case ["curl", "-X", "DELETE", url]:
            assert url.startswith("http://127.0.0.1:8080/v1/sessions/")
        case _:
            pytest.fail(f"no rule for {words}: add one, so that it is checked")


def run_parser_only(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the arguments like `paged-kv`, and do nothing."""
    asked = []
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(parser: argparse.ArgumentParser, argv: Any = None, namespace: Any = None) -> Any:
        known, others = parse(parser, argv, namespace)
        if parser.prog == "paged-kv":
            asked.append(known)
            known.run = lambda _: 0
        return known, others

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    assert command_line.main(arguments) == 0
    assert len(asked) == 1


@pytest.mark.parametrize("block", blocks("json"), ids=name_of)
def test_json_is_json(block: Block) -> None:
    assert json.loads(block.text)


@pytest.mark.parametrize("document", LINKED, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_files_that_are_named_are_there(document: Path) -> None:
    for name, test in FILE.findall(document.read_text(encoding="utf-8")):
        if "/" not in name or NOT_OURS.search(name) or name.startswith("~"):
            continue
        path = ROOT / name
        assert path.exists(), name
        assert not test or test in functions_of(path), f"{name}::{test}"
    for name in FOLDER.findall(document.read_text(encoding="utf-8")):
        assert (ROOT / name).is_dir(), name


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def claims() -> list[tuple[str, str]]:
    """Each claim, and its evidence."""
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    return [(claim, shown) for claim, shown in rows if claim != "claim"]


@cache
def names_of_tests() -> set[str]:
    """Of all test files and functions; "file::function" too."""
    files = list(ROOT.glob("tests/**/test_*.py"))
    functions = {(path.stem, name) for path in files for name in functions_of(path)}
    qualified = {f"{stem}::{name}" for stem, name in functions}
    return {path.stem for path in files} | {name for _, name in functions} | qualified


def test_every_claim_is_shown_by_a_test_or_a_results_file() -> None:
    assert len(claims()) > 60
    for claim, shown in claims():
        for name in re.findall(r"`(.*?)`", shown):
            is_results = name.endswith(".json") and any(RESULTS.glob(name))
            is_file = FILE.fullmatch(f"`{name}`") and (ROOT / name).exists()
            assert is_results or is_file or name in names_of_tests(), f"{claim}: {name}"
        assert shown.startswith("`"), claim


def variables_of_the_reference() -> set[str]:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE))


def test_the_reference_lists_every_variable_that_is_read() -> None:
    read = re.compile(
        r"""(?:environ(?:\.get\(|\.setdefault\(|\[)|getenv\()\s*["']((?:PAGED_KV|XDG|OPENBLAS)\w+)"""
    )
    folders = (
        "paged_kv",
        "allocator",
        "kernels",
        "integrations",
        "server",
        "tests",
        "benches",
        ".ci",
    )
    files = [ROOT / "setup.py", *[each for name in folders for each in (ROOT / name).rglob("*.py")]]
    found = {name for path in files for name in read.findall(path.read_text(encoding="utf-8"))}
    in_shell = (ROOT / ".ci" / "check_kernels").read_text(encoding="utf-8")
    found |= set(re.findall(r"\$\{?(PAGED_KV_\w+)", in_shell))
    assert found == variables_of_the_reference()


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = {
        name.rpartition(".")[2]: name for name in re.findall(r"^::: (.*)$", text, re.MULTILINE)
    }
    for name in set(paged_kv.__all__) - {"__version__"}:
        assert getattr(paged_kv, name).__name__ in shown
    for name, full in shown.items():
        module, _, _ = full.rpartition(".")
        assert name in vars(__import__(module, fromlist=[name])), full


def test_the_quickstart_names_every_extra_of_users() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert all(f"`{extra}`" in text for extra in EXTRAS.keys() - FOR_DEVELOPERS)


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- (\S+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in SITE)
