"""The commands `paged-kv store ...`, and the option --store of other commands."""

import json
from pathlib import Path
from typing import Any

import pytest

from paged_kv.command_line import main
from tests.support.store_entries import entry, links, open_store, prompt, put, stored_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of one prompt of three blocks, and of another of one block."""
    folder = tmp_path / "store"
    with open_store(folder) as store:
        for seed, length in ((1, 600), (2, 256)):
            put(store, [entry(link) for link in links(prompt(seed, length))])
    return folder


def run(folder: Path, *arguments: str) -> int:
    return main(["store", *arguments, "--store", str(folder)])


def run_json(capsys: Any, folder: Path, *arguments: str) -> tuple[int, Any]:
    status = run(folder, *arguments, "--json")
    return status, json.loads(capsys.readouterr().out)


def test_list_and_verify_a_sound_store(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (last,) = links(prompt(3))
    with open_store(folder) as store:
        put(store, [entry(last)])
        keys = stored_keys(store)
    status, blobs = run_json(capsys, folder, "list")
    assert status == 0
    assert {blob["name"] for blob in blobs} == keys
    assert blobs[0]["name"] == entry(last).place.key
    assert run(folder, "ls") == 0
    assert "5 entries, " in capsys.readouterr().out
    assert run_json(capsys, folder, "verify") == (0, {"entries": 5, "findings": []})


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
    assert problems.keys() == {one.stem, two.stem, three.stem, "notes.txt", "a" * 32 + ".tmp"}
    assert problems[one.stem].startswith("damaged: the checksum is wrong")
    assert problems[two.stem].startswith("other entry: it holds entry")
    assert problems[three.stem].startswith("other version: it has format version '2'")
    assert "counts against the cap" in problems["notes.txt"]
    assert problems["a" * 32 + ".tmp"] == "left by a writer that died"
    assert run(folder, "verify") == 1
    assert "4 entries read, 4 faults found" in capsys.readouterr().out

    assert run(folder, "gc") == 0
    assert "2 entries removed" in capsys.readouterr().out
    assert not one.exists()
    assert not two.exists()
    assert three.exists()
    assert (folder / "notes.txt").read_text() == "mine"
