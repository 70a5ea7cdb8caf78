"""Traces are read, and a line that makes no sense is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from paged_kv.trace.requests import read_trace

MOONCAKE = {"timestamp": 5, "input_length": 700, "output_length": 0, "hash_ids": [3, 4]}
# The first made-up token that no id names.
OWN = 1 << 30


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_requests_come_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    later = {**MOONCAKE, "timestamp": 9, "input_length": 1, "hash_ids": []}
    trace = read_trace(written(tmp_path / "trace", later, MOONCAKE))
    first, second = trace.requests
    assert [each.arrives for each in trace.requests] == [0, 4]
    assert first.prompt == [3] * 512 + [4] * 188
    assert [first.token(position) for position in (511, 512, 1023, 1024)] == [3, 4, 4, OWN]
    assert second.prompt == [OWN + 1]
    assert first.answer_length == 1


def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    header = {"paged_kv_trace": 2, "layers": [{"heads": 1}]}
    with pytest.raises(ValueError, match="heads"):
        read_trace(written(tmp_path / "trace", header, MOONCAKE))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("w 0 0 300 2", "no JSON object"),
        ("[" * 100_000, "no JSON object"),
        ({"paged_kv_trace": 1, "page_size": 256}, "version 1.*version 2"),
        ({"paged_kv_trace": 3, "written_by": "9.1"}, "version 3.*9.1"),
        ({**MOONCAKE, "timestamp": -1}, "timestamp is -1"),
        ({**MOONCAKE, "input_length": 0}, "input_length is 0"),
        ({**MOONCAKE, "output_length": 1.5}, "output_length is 1.5"),
        ({**MOONCAKE, "hash_ids": [1 << 30]}, "hash_ids"),
        ({"timestamp": 1}, "input_length is None"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(ValueError, match=f"trace, line 1: .*{message}"):
        read_trace(path)
