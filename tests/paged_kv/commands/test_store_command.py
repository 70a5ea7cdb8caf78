"""The commands `paged-kv store ...`, and the option --store of other commands."""

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from paged_kv.command_line import main
from paged_kv.integrations.generation import text_generation
from paged_kv.store.entry_file import file_name
from paged_kv.store.keys import EntryPlace
from tests.support.store_entries import PAGES, entry, is_right, links, open_store, prompt
from tests.support.stored_prompts import TEXT
from tests.support.zoo import small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of one prompt of three blocks, and of another of one block."""
    folder = tmp_path / "store"
    with open_store(folder) as store:
        for seed, length in ((1, 600), (2, 256)):
            store.put([entry(link) for link in links(prompt(seed, length))])
    return folder


def run(folder: Path, *arguments: str) -> int:
    return main(["store", *arguments, "--store", str(folder)])


def run_json(capsys: Any, folder: Path, *arguments: str) -> tuple[int, Any]:
    status = run(folder, *arguments, "--json")
    return status, json.loads(capsys.readouterr().out)


def a_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def test_list_and_verify_a_sound_store(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    status, rows = run_json(capsys, folder, "list")
    assert (status, len(rows)) == (0, 4)
    assert {row["model"] for row in rows} == {"llama"}
    assert sum(row["num_tokens"] for row in rows) == 856
    assert run(folder, "ls") == 0
    assert "llama, fp16, pages 0: 4 entries, 856 tokens" in capsys.readouterr().out
    assert run_json(capsys, folder, "verify") == (0, {"entries": 4, "findings": []})


def test_verify_names_everything_that_is_wrong_and_gc_removes_it(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    one, two, three, _ = sorted(folder.glob("*.safetensors"))
    one.write_bytes(one.read_bytes()[:-1])
    two.write_bytes(three.read_bytes())
    three.write_bytes(three.read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    (folder / "notes.txt").write_text("mine")
    (folder / ("a" * 32 + ".tmp")).write_text("half")
    status, found = run_json(capsys, folder, "verify")
    assert status == 1
    problems = {each["name"]: each["problem"] for each in found["findings"]}
    assert problems.keys() == {one.name, two.name, three.name, "notes.txt", "a" * 32 + ".tmp"}
    assert problems[one.name].startswith("damaged: the checksum is wrong")
    assert problems[two.name].startswith("other entry: the file holds entry")
    assert problems[three.name].startswith("other version: it has format version '2'")
    assert "counts against the cap" in problems["notes.txt"]
    assert problems["a" * 32 + ".tmp"] == "left by a writer that died"
    assert run(folder, "verify") == 1
    assert "4 entries read, 4 faults found" in capsys.readouterr().out

    assert run(folder, "gc") == 0
    assert "2 files removed" in capsys.readouterr().out
    assert not one.exists()
    assert not two.exists()
    assert three.exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_clear(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    status, done = run_json(capsys, folder, "clear", "--dry-run")
    assert (status, done["files"], done["dry_run"]) == (0, 4, True)
    assert len(list(folder.glob("*.safetensors"))) == 4
    assert run(folder, "clear") == 0
    assert "4 files removed" in capsys.readouterr().out
    assert not list(folder.glob("*.safetensors"))
    assert (folder / "notes.txt").exists()
    assert run_json(capsys, folder, "list") == (0, [])


def test_export_and_import(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    archive, other = tmp_path / "pages.tar", tmp_path / "other"
    assert run(folder, "export", str(archive)) == 0
    assert run(folder, "export", str(archive)) == 1
    assert "exists, and export overwrites nothing" in capsys.readouterr().err
    assert run(other, "import", str(archive)) == 0
    with open_store(other) as store:
        for link in links(prompt(1, 600)):
            assert is_right(store.get(EntryPlace(link, PAGES)))
        assert len(store.stored_keys()) == 4
    capsys.readouterr()
    # Again: nothing is new, and nothing is wrong.
    status, done = run_json(capsys, other, "import", str(archive))
    assert (status, done["entries"], done["skipped"]) == (0, 0, {})


def test_the_order_of_use_survives_export_and_import(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    archive, other = tmp_path / "pages.tar", tmp_path / "other"
    chain = links(prompt(5, 20 * 256))
    with open_store(other) as store:
        store.put([entry(links(prompt(2))[0]), entry(links(prompt(9))[0])])
    with open_store(folder) as store:
        store.put([entry(link, words=200_000) for link in chain])
        order = [row.key for row in store.rows()]
    assert run(folder, "export", str(archive)) == 0
    assert run(other, "import", str(archive)) == 0
    with open_store(other) as store:
        assert [row.key for row in store.rows()][: len(order)] == order
    for each in (folder, other):
        assert run(each, "gc", "--store-bytes", "10MB") == 0
        with open_store(each) as store:
            kept = [EntryPlace(link, PAGES).key in store.stored_keys() for link in chain]
        # The beginning of a prompt stays: its continuation is of no use without it.
        assert sum(kept) > 5
        assert all(kept[: sum(kept)])


def test_import_takes_nothing_that_is_not_sound(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    good = a_file(folder)
    bad = tmp_path / file_name("b" * 64)
    bad.write_bytes(good.read_bytes())
    archive = tmp_path / "pages.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(good, good.name)
        tar.add(bad, bad.name)
        tar.add(good, f"../{good.name}")
        link = tarfile.TarInfo(file_name("c" * 64))
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    other = tmp_path / "other"
    status, done = run_json(capsys, other, "import", str(archive))
    assert (status, done["entries"]) == (1, 1)
    assert done["skipped"].keys() == {bad.name, f"../{good.name}", file_name("c" * 64)}
    assert [path.name for path in other.glob("*.safetensors")] == [good.name]
    bad.write_text("no tar file")
    assert run(other, "import", str(bad)) == 1
    assert "is not an export of a page store" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_begins_with_what_is_stored(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Any,
) -> None:
    monkeypatch.setattr(text_generation, "load", lambda _: trained("stdlib-llama"))
    prompt = "import os\n\n\ndef walk(path):\n" * 40
    folder = tmp_path / "store"

    def generate(*options: str) -> tuple[str, str]:
        command = ["generate", "--prompt", prompt, "--max-tokens", "8", *options]
        assert main(command) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    expected, _ = generate()
    first, summary = generate("--store", str(folder))
    assert "of them cached" not in summary
    again, summary = generate("--store", str(folder), "--store-bytes", "20MB")
    assert first == again == expected
    assert "of them cached" in summary
    samples, _ = generate("--store", str(folder), "--num-samples", "2", "--temp", "1e-6")
    assert samples.count(expected.rstrip("\n")) == 2
    shutil.rmtree(folder)
    generate("--prompt", prompt + "x", "--store", str(folder))
    with open_store(folder) as store:
        # One whole block, and the rest of the longer prompt.
        assert len(store.stored_keys()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "max_tokens"), [("gemma3_text", 300), ("qwen3_next", 20)])
def test_a_prompt_is_found_again_whose_answer_cannot_be_taken_back(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Any,
    name: str,
    max_tokens: int,
) -> None:
    """A window has passed the prompt, or a state has already seen the answer."""
    _, tokenizer = trained("stdlib-llama")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).touch()
    monkeypatch.setattr(text_generation, "load", lambda _: (small_model(name), tokenizer))
    outputs = []
    for _ in range(2):
        generation = text_generation.TextGeneration(
            str(tmp_path),
            page_format="fp16",
            max_bytes=1 << 28,
            max_tokens=max_tokens,
            temp=0.0,
            seed=None,
            store=str(tmp_path / "store"),
            store_bytes=1 << 30,
        )
        generation.stream(TEXT[:300], None)
        generation.close()
        outputs.append(capsys.readouterr())
    assert outputs[0].out == outputs[1].out
    assert "of them cached" not in outputs[0].err
    assert re.search(r"300 tokens in [\d.]+ s, 299 of them cached", outputs[1].err)
