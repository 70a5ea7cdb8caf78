"""Public traces become traces of this project, and a line that makes no sense is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.command_line import main
from paged_kv.trace.public_traces import PromptTree, PublicRequest, read_requests
from paged_kv.trace.replay import read_trace
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.reuse_replay import pages_of
from tests.support.examples import examples

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


def test_requests_run_as_long_as_their_tokens_take(tmp_path: Path) -> None:
    """A step of 30 ms for the prompt, and one for each of 9 tokens."""
    load = imported(tmp_path, "mooncake", mooncake() + mooncake(timestamp=400))
    assert [(each.begins, each.ends) for each in load.requests] == [(0, 300), (395, 695)]
    assert load.step_ms(2048) == 30


def test_an_azure_trace_by_hand(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46.6805900,2000,44", "2023-11-16 18:15:50.9951690,2000,0"]
    load = imported(tmp_path, "azure", AZURE + "\n".join(rows))
    found = [(each.arrives, each.prompt, each.answer, each.runs) for each in load.requests]
    assert found == [(0, 2000, 44, ((0, 0, 7),)), (4315, 2000, 0, ((1, 0, 7),))]


def test_azure_times_may_name_the_zone(tmp_path: Path) -> None:
    rows = ["2024-05-10 00:00:00.009930+00:00,9,1", "2024-05-10 00:00:01+00:00,9,1"]
    load = imported(tmp_path, "azure", AZURE + "\r\n".join(rows))
    assert [each.arrives for each in load.requests] == [0, 991]


@examples(100)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(1, 512)), max_size=9
    )
)
def test_pages_are_shared_as_a_naive_reading_says(prompts: list[tuple[list[int], int]]) -> None:
    """A prompt of some full blocks, and tokens in one more."""
    requests = [PublicRequest(0, 512 * len(ids) + rest, 1, (*ids, 99)) for ids, rest in prompts]
    tree = PromptTree()
    for number, request in enumerate(requests):
        common = [naive(request, other) for other in requests[:number]]
        like, shared = tree.add(number, request.page_ids)
        assert shared == max(common, default=0)
        if shared:
            assert like == common.index(shared)


def naive(some: PublicRequest, other: PublicRequest) -> int:
    """Pages without the last token of either, in blocks that all begin alike."""
    pages = 0
    while (
        256 * (pages + 1) < min(some.prompt, other.prompt)
        and some.block_ids[: pages // 2 + 1] == other.block_ids[: pages // 2 + 1]
    ):
        pages += 1
    return pages


def test_pages_have_one_id_where_prompts_begin_alike(tmp_path: Path) -> None:
    lines = [mooncake(hash_ids=ids) for ids in ([1, 2], [1, 3], [1, 2], [1, 3])]
    load = imported(tmp_path, "mooncake", "".join(lines))
    first, second, third, fourth = [pages_of(each.runs) for each in load.requests]
    assert (first, second) == (third, fourth)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


OBJECT = "is no JSON object with the fields timestamp, input_length, output_length, hash_ids"
WRONG_LINES = [
    ("{", OBJECT),
    ("[" * 100_000, OBJECT),
    ("7\n", OBJECT),
    ("\x00\x01", OBJECT),
    (mooncake(output_length=None), OBJECT),
    (mooncake(other=1), OBJECT),
    (mooncake(timestamp="0"), "timestamp is '0': it must be a whole number of milliseconds"),
    (mooncake(timestamp=1.5), "timestamp is 1.5: it must be a whole number"),
    (mooncake(timestamp=1 << 60), "it must be a whole number of milliseconds from 0 to 17,592,"),
    (mooncake(timestamp=4), "the time is 1 ms before that of the request above: sort the lines"),
    (mooncake(input_length=-1), "input_length is -1: it must be a whole number of tokens from 1"),
    (mooncake(input_length=True), "input_length is True: it must be a whole number of tokens"),
    (mooncake(input_length=1 << 25), "from 1 to 16,777,216"),
    (mooncake(output_length=-3), "output_length is -3: it must be a whole number of tokens from 0"),
    (mooncake(output_length=[]), "output_length is []: it must be a whole number"),
    (mooncake(hash_ids=7), "hash_ids is 7: it must be a list of whole numbers"),
    (mooncake(hash_ids=[7, 8.0]), "hash_ids is [7, 8.0]: it must be a list of whole numbers"),
    (mooncake(hash_ids=[-7, 8]), "hash_ids is [-7, 8]: it must be a list of whole numbers from 0"),
    (mooncake(hash_ids=[7]), "hash_ids has 1 ids: 1,024 tokens need 2"),
    (mooncake(hash_ids=[7, 8, 9]), "hash_ids has 3 ids: 1,024 tokens need 2"),
    (f'{{"timestamp": {BIG}}}', OBJECT),
]
MOMENT = "2023-11-16 18:15:46.68"
WRONG_ROWS = [
    (f"{MOMENT},5", "has 2 cells: it must have TIMESTAMP,ContextTokens,GeneratedTokens"),
    (f"{MOMENT},5,6,7", "has 4 cells"),
    ("2023-11-16,5,6", "TIMESTAMP is '2023-11-16': it must be like 2023-11-16 18:15:46.6805900"),
    ("2023-13-16 18:15:46,5,6", "TIMESTAMP is '2023-13-16 18:15:46': it must be like"),
    ("2023-11-16 18:15:45,5,6", "the time is 1,000 ms before that of the request above"),
    (f"{MOMENT},x,6", "ContextTokens is 'x': it must be a whole number of tokens from 1"),
    (f"{MOMENT},0,6", "ContextTokens is 0: it must be a whole number of tokens from 1"),
    (f"{MOMENT},5,-6", "GeneratedTokens is '-6': it must be a whole number of tokens from 0"),
    (f"{MOMENT},5,{BIG}", "GeneratedTokens is '999"),
]


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


@pytest.mark.parametrize(("line", "message"), WRONG_LINES, ids=range(len(WRONG_LINES)))
def test_a_wrong_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    said = refused(tmp_path, "mooncake", (mooncake() + "\n" + line).encode(), capsys)
    assert f"{tmp_path / 'public'}, line 3: " in said
    assert message in said


@pytest.mark.parametrize(("row", "message"), WRONG_ROWS, ids=range(len(WRONG_ROWS)))
def test_a_wrong_row_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, message: str
) -> None:
    good = "2023-11-16 18:15:46,5,6\n"
    said = refused(tmp_path, "azure", (AZURE + good + row).encode(), capsys)
    assert f"{tmp_path / 'public'}, line 3: " in said
    assert message in said


@pytest.mark.parametrize("name", ["mooncake", "azure"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00" * 1000, b"a,b,c\n"])
def test_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    said = refused(tmp_path, name, content, capsys)
    assert f"{tmp_path / 'public'}, line 1: " in said
    if not content:
        assert f"the file has no requests: give one in the {name} format" in said


def test_a_header_alone_has_no_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no requests" in refused(tmp_path, "azure", AZURE.encode(), capsys)


def test_a_file_that_exists_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "public", tmp_path / "out"
    source.write_text(mooncake())
    out.write_text("mine")
    assert main(["trace", "import", "mooncake", str(source), str(out)]) == 1
    assert "exists, and a trace would overwrite it" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_wrong_trace_leaves_an_empty_file_empty(tmp_path: Path) -> None:
    source, out = tmp_path / "public", tmp_path / "out"
    source.write_text(mooncake() + "{")
    out.touch()
    assert main(["trace", "import", "mooncake", str(source), str(out)]) == 1
    assert not out.read_bytes()


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    source = tmp_path / "public"
    source.write_text(AZURE + f"{MOMENT},5,6\n", encoding="utf-8-sig")
    (request,) = read_requests("azure", source)
    assert (request.prompt, request.answer, request.page_ids) == (5, 6, [])
