"""Public traces become traces of this project, and a line that makes no sense is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from paged_kv.command_line import main
from paged_kv.trace.replay import read_trace
from paged_kv.trace.requests import TracedLoad

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = {"timestamp": 5, "input_length": 1024, "output_length": 9, "hash_ids": [7, 8]}
BIG = "9" * 5000


def mooncake(**changes: Any) -> str:
    """A line; a field without a value is left out."""
    content = {name: value for name, value in (GOOD | changes).items() if value is not None}
    return json.dumps(content) + "\n"


def imported(folder: Path, name: str, text: str) -> TracedLoad:
    (folder / "public").write_text(text)
    assert main(["trace", "import", name, str(folder / "public"), str(folder / "out")]) == 0
    return TracedLoad(read_trace(folder / "out"), 256)


def test_a_mooncake_trace_by_hand(tmp_path: Path) -> None:
    lines = [
        mooncake(),
        mooncake(timestamp=1005, input_length=1537, hash_ids=[7, 8, 9, 1]),
        mooncake(timestamp=1005, input_length=1536, output_length=0, hash_ids=[7, 8, 2]),
        mooncake(timestamp=9000, input_length=100, hash_ids=[7]),
    ]
    load = imported(tmp_path, "mooncake", "\n".join(lines))
    found = [(each.arrives, each.prompt, each.answer, each.runs) for each in load.requests]
    assert found == [
        (0, 1024, 9, ((0, 0, 3),)),
        (1000, 1537, 9, ((0, 0, 3), (1, 3, 6))),
        # The first request ends before its fourth page is full.
        (1000, 1536, 0, ((0, 0, 3), (1, 3, 4), (2, 4, 5))),
        (8995, 100, 9, ()),
    ]


OBJECT = "is no JSON object with the fields timestamp, input_length, output_length, hash_ids"
MOMENT = "2023-11-16 18:15:46.68"
WRONG = {
    "mooncake": [
        ("{", OBJECT),
        ("[" * 100_000, OBJECT),
        (mooncake(other=1), OBJECT),
        (mooncake(timestamp=1.5), "timestamp is 1.5: it must be a whole number"),
        (mooncake(timestamp=4), "the time is 1 ms before that of the request above"),
        (mooncake(input_length=True), "input_length is True: it must be a whole number of tokens"),
        (mooncake(output_length=-3), "output_length is -3: it must be a whole number of tokens"),
        (mooncake(hash_ids=[7]), "hash_ids has 1 ids: 1,024 tokens need 2"),
        (f'{{"timestamp": {BIG}}}', OBJECT),
    ],
    "azure": [
        (f"{MOMENT},5", "has 2 cells: it must have TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("2023-13-16 18:15:46,5,6", "TIMESTAMP is '2023-13-16 18:15:46': it must be like"),
        (f"{MOMENT},0,6", "ContextTokens is 0: it must be a whole number of tokens from 1"),
    ],
}


def refused(folder: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a file that is not imported."""
    source, out = folder / "public", folder / "out"
    source.write_bytes(content)
    assert main(["trace", "import", name, str(source), str(out)]) == 1
    assert not out.exists()
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert len(said) < 400
    return said


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    good = mooncake() + "\n" if name == "mooncake" else AZURE + "2023-11-16 18:15:46,5,6\n"
    for line, message in WRONG[name]:
        said = refused(tmp_path, name, (good + line).encode(), capsys)
        assert f"{tmp_path / 'public'}, line 3: " in said
        assert message in said
    for content in (b"", b"\xff\xfe\x00" * 1000):
        assert "line 1: " in refused(tmp_path, name, content, capsys)
