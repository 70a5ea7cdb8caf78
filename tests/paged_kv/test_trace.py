"""Requests are recorded without their tokens, and what goes wrong with the file hurts nobody."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagePool
from paged_kv.kernels.pages.page_format import LayerGeometry
from paged_kv.prefix.keeping import Rates
from paged_kv.trace import RecordedRequest, RequestRecorder, read_trace, request_recorder


@pytest.fixture
def recording(tmp_path: Path) -> RequestRecorder:
    return RequestRecorder(tmp_path / "trace")


def end(recording: RequestRecorder, prompt: list[int], salt: str = "", answer: int = 0) -> None:
    recording.end(RecordedRequest(0.0, prompt, [7] * answer), salt, Rates())


def test_requests_that_begin_alike_have_ids_in_common_unless_their_salts_differ(
    recording: RequestRecorder, tmp_path: Path
) -> None:
    """The page that was used least lately is forgotten first."""
    recording._ids.most = 6
    pool = PagePool(1, max_bytes=1 << 20)
    assert recording.is_of(pool)
    end(recording, [1] * 700)
    end(recording, [1] * 700, salt="key")
    end(recording, [*[1] * 400, *[2] * 300])
    end(recording, [1] * 500, answer=12)
    end(recording, [7] * 600)
    end(recording, [1] * 300)
    end(recording, [1] * 300, salt="key")
    trace = read_trace(tmp_path / "trace")
    ids = [list(each.block_ids) for each in trace.requests]
    assert ids == [[0, 1], [2, 3], [0, 4], [0, 5], [6, 7], [0], [8]]
    assert trace.max_bytes == 1 << 20


def test_a_trace_is_of_one_pool_and_of_its_like_after_it(recording: RequestRecorder) -> None:
    pools = [PagePool(1, max_bytes=1 << 20) for _ in range(2)]
    for pool in pools:
        pool.group_of(0).open_layer(0, LayerGeometry.of(*[mx.zeros((1, 1, 1, 32))] * 2))
    assert [recording.is_of(pool) for pool in pools] == [True, False]
    del pools[0], pool
    assert recording.is_of(pools[0])


def test_the_environment_names_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGED_KV_TRACE", raising=False)
    assert request_recorder() is None
    monkeypatch.setenv("PAGED_KV_TRACE", str(tmp_path / "trace-%p"))
    assert request_recorder() is request_recorder()
    assert (tmp_path / f"trace-{os.getpid()}").exists()
    notes = tmp_path / "notes"
    notes.write_text("mine")
    for path, error in (
        (notes, FileExistsError),
        (tmp_path, IsADirectoryError),
        (tmp_path / "a" / "b", FileNotFoundError),
    ):
        monkeypatch.setenv("PAGED_KV_TRACE", str(path))
        with pytest.raises(error, match=path.name):
            request_recorder()
    assert notes.read_text() == "mine"


def test_a_forked_process_records_nothing(
    recording: RequestRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 0)
    end(recording, [1])
    assert (tmp_path / "trace").read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else(
    recording: RequestRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    recording._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115  # the trace closes it
    end(recording, [1])
    end(recording, [1])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "No space left" in said
    assert "PAGED_KV_TRACE" in said


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
