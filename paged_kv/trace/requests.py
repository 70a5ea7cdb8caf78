"""Reads traces: those of `paged_kv.trace.recorder`, and those in Mooncake's format, whose ids stand
for 512 tokens each and which say nothing of a pool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from paged_kv.kernels.pages.page_format import LayerGeometry
from paged_kv.pool.layer_kinds import Window

VERSION = 2
MOONCAKE_BLOCK = 512
# For each number of a request the least and the most. More tokens would fill the memory.
_LIMITS = {"timestamp": (0, 1 << 44), "input_length": (1, 1 << 24), "output_length": (0, 1 << 24)}
# Ids are tokens of a replay, which MLX holds in 32 bits. From here on each is of one request alone.
_OWN = 1 << 30


@dataclass(frozen=True)
class TracedLayers:
    """Layers that are alike: `count` of them, each with keys of `k_heads` heads of `k_dim` numbers,
    and values. `dtype` is MLX's name. `window` and `sink_tokens` are those of `Window`; without a
    window it is None."""

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int
    dtype: str
    window: int | None = None
    sink_tokens: int = 0
    count: int = 1

    @classmethod
    def of(cls, geometry: LayerGeometry, window: Window | None) -> TracedLayers:
        """One layer of this geometry and with this window."""
        keys, values = (geometry.k_heads, geometry.k_dim), (geometry.v_heads, geometry.v_dim)
        size, sink_tokens = (window.size, window.sink_tokens) if window else (None, 0)
        return cls(*keys, *values, str(geometry.k_dtype).rpartition(".")[2], size, sink_tokens)


# Llama 3.1 8B, for traces that say nothing of a model.
LLAMA = TracedLayers(8, 128, 8, 128, "float16", count=32)


@dataclass(frozen=True, eq=False)
class TracedRequest:
    """A request.

    Attributes:
        number: its place in the order of arrival.
        arrives: milliseconds since the trace began.
        prompt_length, answer_length: in tokens; at least 1.
        block_ids: of its first tokens, see `hash_ids` of the recorder.
        block_size: tokens that each of these stands for.
    """

    number: int
    arrives: int
    prompt_length: int
    answer_length: int
    block_ids: Sequence[int]
    block_size: int

    def token(self, position: int) -> int:
        """A made-up token for a position: that of others where they are alike, or its own."""
        block = position // self.block_size
        return self.block_ids[block] if block < len(self.block_ids) else _OWN + self.number

    @property
    def prompt(self) -> list[int]:
        """The tokens of its prompt."""
        blocks = ([block] * self.block_size for block in self.block_ids)
        known = [*chain.from_iterable(blocks)][: self.prompt_length]
        return known + [_OWN + self.number] * (self.prompt_length - len(known))


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival, and what the recorder says of the pool and the steps.
    What a trace does not say is of a model of 8 billion parameters; the times are about those on a
    large Mac."""

    requests: list[TracedRequest]
    layers: list[TracedLayers]
    max_bytes: int | None = None
    page_format: str = "fp16"
    decode_ms: float = 30.0
    prompt_ms: float = 1.0


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, is of another version, or a line is wrong; the message names the
            file and the line, what was found and what is needed.
    """
    header: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    # A binary file is refused for what its first line holds, not for its encoding.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                content = _object(line)
                if number == 1 and "paged_kv_trace" in content:
                    header = _of_this_version(content)
                else:
                    lines.append(_request(content))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not lines:
        raise ValueError(f"{path} has no requests: record until at least one has ended")
    try:
        return _trace(header, lines)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has a broken first line or times ({error}): record again"
        ) from None


def _trace(header: dict[str, Any], lines: list[dict[str, Any]]) -> Trace:
    names = ("max_bytes", "page_format")
    known: dict[str, Any] = {name: header[name] for name in names if name in header}
    for name in ("decode_ms", "prompt_ms"):
        if times := [float(each[name]) for each in lines if each.get(name)]:
            known[name] = median(times)
    lines.sort(key=lambda each: int(each["timestamp"]))
    requests = [
        TracedRequest(
            number,
            line["timestamp"] - lines[0]["timestamp"],
            line["input_length"],
            max(1, line["output_length"]),
            line["hash_ids"],
            header.get("page_size", MOONCAKE_BLOCK),
        )
        for number, line in enumerate(lines)
    ]
    layers = [TracedLayers(**each) for each in header.get("layers", [])] or [LLAMA]
    return Trace(requests, layers, **known)


def _of_this_version(header: dict[str, Any]) -> dict[str, Any]:
    version = header["paged_kv_trace"]
    if version != VERSION:
        writer = header.get("written_by", "an earlier one, which recorded the events of blocks")
        raise ValueError(
            f"version {version} of the format is of another paged_kv ({writer}): this one reads "
            f"requests, version {VERSION}. Record them again with `paged-kv trace record`"
        )
    return header


def _object(line: str) -> dict[str, Any]:
    with_what = "give a trace of `paged-kv trace record`, or one in Mooncake's format"
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{line[:80]!r} is no JSON object: {with_what}")
    return content


def _request(content: dict[str, Any]) -> dict[str, Any]:
    for name, (least, most) in _LIMITS.items():
        number = content.get(name)
        if type(number) is not int or not least <= number <= most:
            found = repr(number)[:80]
            raise ValueError(f"{name} is {found}: it must be an integer from {least} to {most:,}")
    ids = content.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < _OWN for each in ids):
        found = repr(ids)[:80]
        raise ValueError(f"hash_ids is {found}: it must be a list of integers from 0 to 2^30 - 1")
    return content
