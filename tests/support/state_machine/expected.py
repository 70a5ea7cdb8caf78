"""The expected outputs of models: from mlx-lm's own caches in one step, or from a table."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import PagedKVCache
from paged_kv.cache.saved_state import page_formats
from paged_kv.kernels.pages.page_format import FP16, page_format_named
from paged_kv.pool.layer_kinds import Window
from tests.support.full_pages import full_format
from tests.support.state_machine.rows import WRITTEN, Chain, Row
from tests.support.state_machine.table_model import (
    DECAY,
    DIM,
    KV_HEADS,
    Q_HEADS,
    SCALE,
    Floats,
    TableModel,
    key_rows,
    query_rows,
    state_rows,
    table_after,
    value_rows,
)

# The largest differences of what pages hold, by how it came about. Rows of the table differ by 2.
EXACT, QUANTISED_TWICE, CENTRED = 1e-5, 0.25, 0.75

Indices = npt.NDArray[np.int64]
Check = Callable[[Floats], list[str]]
"""Says what is wrong with a model's outputs [S, width] for the last S tokens of a row."""


class Oracle(Protocol):
    def expect(self, row: Row, layers: list[PagedKVCache], count: int) -> Check:
        """Compare the outputs for the last `count` tokens of a sequence, which may not be computed
        yet."""
        ...

    def wrong_content(self, row: Row, layers: list[PagedKVCache]) -> list[str]:
        """The differences between a sequence's pages and the expected content."""
        ...


class StockOracle:
    """mlx-lm's own caches, in one step of all tokens."""

    TOLERANCE = 2e-3

    def __init__(self, model: Any) -> None:
        self._model = model
        self._outputs = lru_cache(maxsize=64)(self._computed)

    def expect(self, row: Row, layers: list[PagedKVCache], count: int) -> Check:
        expected: Floats = self._outputs(tuple(row.tokens))[-count:]

        def check(found: Floats) -> list[str]:
            worst = _worst(found, expected)
            return [] if worst <= self.TOLERANCE else [f"logits differ by {worst}"]

        return check

    def wrong_content(self, row: Row, layers: list[PagedKVCache]) -> list[str]:
        return []

    def _computed(self, tokens: tuple[int, ...]) -> Floats:
        cache = make_prompt_cache(self._model)
        outputs: Floats = np.array(self._model(mx.array([tokens]), cache=cache))[0]
        return outputs


class _StepPages:
    """What a step's tokens see of the pages that it writes: the step's own tokens in their page in
    16 bits, and earlier pages in their format. With "auto" that is the format that a page got when
    the step reserved it, otherwise the sequence's."""

    def __init__(self, row: Row, cache: PagedKVCache, start: int) -> None:
        self._row, self._cache, self._start = row, cache, start
        (sequence,) = cache.sequences
        self._format = sequence.page_format
        self._now = _formats_now(cache, len(row.tokens))

    def seen_from(self, at: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        """The keys and values that the token at this position sees, given what pages hold after the
        step."""
        if self._cache.layer in self._cache.pool.windows:
            return keys, values
        seen = keys.copy(), values.copy()
        own, begun = at // 256 * 256, self._start // 256 * 256
        for content, part in zip(seen, ("keys", "values"), strict=True):
            if self._now[at] != "fp16":
                rows = _table_rows(self._row.tokens, self._cache.layer, part, ())
                given = slice(max(own, self._start), own + 256)
                content[:, given] = rows[:, given]
            if self._format != FP16 and begun < own and self._now[begun] == "fp16":
                number_format = getattr(self._format if begun else self._format.first, part)
                page = mx.array(content[:, begun : begun + 256])
                content[:, begun : begun + 256] = np.array(
                    number_format.decode(number_format.encode(page), page.dtype)
                )
        return seen


class TableOracle:
    """The table of a `TableModel`, held in the formats of the pages."""

    # For sums of values around 1; queries for q4 keys are rounded to 16 bits.
    TOLERANCE = 2e-3

    def __init__(self, model: TableModel) -> None:
        self._model = model

    def expect(self, row: Row, layers: list[PagedKVCache], count: int) -> Check:
        start = len(row.tokens) - count
        wrong_formats = [each for cache in layers for each in _wrong_formats(row, cache, start)]
        checked = sorted({0, count // 2, *range(max(0, count - 3), count)})
        at = [start + each for each in checked]
        answers = {
            f"layer {cache.layer}": list(self._seen(row, cache, at, start)) for cache in layers
        }
        if self._model.has_states:
            answers["the state"] = [np.stack([_state(row.tokens[: each + 1]) for each in at])]

        def check(found: Floats) -> list[str]:
            wrong, first = list(wrong_formats), 0
            for name, expected in answers.items():
                part = found[checked, first : first + expected[0].shape[1]]
                first += part.shape[1]
                worst = min(_worst(part, each) for each in expected)
                if worst > self.TOLERANCE:
                    wrong.append(f"{name} differs by {worst}")
            return wrong

        return check

    def wrong_content(self, row: Row, layers: list[PagedKVCache]) -> list[str]:
        return [
            f"{part} of layer {cache.layer}, token {at}: {reason}"
            for cache in layers
            for part, held in _gathered(row, cache).items()
            for at, reason in _Held(row, cache, part).wrong(held)
        ]

    def _seen(self, row: Row, cache: PagedKVCache, at: list[int], start: int) -> Iterable[Floats]:
        """The attention outputs of the queries at these positions, [positions, Q_HEADS * DIM]. A
        step that is attended to before it is written is not in the ring yet, so two answers may be
        right."""
        window = cache.pool.windows.get(cache.layer)
        contents = _Held(row, cache, "keys").contents(), _Held(row, cache, "values").contents()
        pages = _StepPages(row, cache, start)
        yield self._attended(row, cache.layer, window, at, *contents, pages)
        if window is not None and len(row.tokens) - start > 1:
            for content, part in zip(contents, ("keys", "values"), strict=True):
                content[:, start:] = _table_rows(row.tokens, cache.layer, part, ())[:, start:]
            yield self._attended(row, cache.layer, window, at, *contents, pages)

    def _attended(
        self,
        row: Row,
        layer: int,
        window: Window | None,
        positions: list[int],
        keys: Floats,
        values: Floats,
        pages: _StepPages,
    ) -> Floats:
        answers = []
        whole = keys, values
        for at in positions:
            keys, values = pages.seen_from(at, *whole)
            first = 0 if window is None else max(0, at - window.size + 1)
            heads = []
            for head in range(Q_HEADS):
                query = table_after(())[query_rows(row.tokens[at], at, layer, head)]
                kv_head = head * KV_HEADS // Q_HEADS
                scores = keys[kv_head, first : at + 1] @ query * SCALE
                weights = np.exp(scores - scores.max())
                heads.append(weights / weights.sum() @ values[kv_head, first : at + 1])
            answers.append(np.concatenate(heads))
        return np.stack(answers)


@dataclass(frozen=True)
class _Option:
    """The possible stored values of some tokens, [KV_HEADS, tokens, DIM].

    Numbers that were quantised twice often lie between two codes. Codes of keys with a centre turn
    on all tokens that their page had when it was recoded, those among them that were trimmed since.
    """

    numbers: Floats
    tolerance: float

    @property
    def is_exact(self) -> bool:
        return self.tolerance == EXACT

    def agrees(self, held: Floats) -> npt.NDArray[np.bool_]:
        """The tokens that hold these values."""
        same: npt.NDArray[np.bool_] = np.abs(self.numbers - held).max(axis=(0, 2)) <= self.tolerance
        return same


class _Held:
    """The keys or values of a sequence in one layer, [KV_HEADS, tokens, DIM], in the formats of its
    pages. What they hold tells in which of the possible ways they came to these."""

    def __init__(self, row: Row, cache: PagedKVCache, part: str) -> None:
        self._row, self._cache, self._part = row, cache, part
        self._now = _formats_now(cache, len(row.tokens))

    def contents(self) -> Floats:
        """The stored values, once the latest step is written."""
        row = self._row
        chains = [self._possible(at) for at in range(len(row.tokens))]
        assert all(chains), self._complaint(next(at for at, c in enumerate(chains) if not c))
        result = np.empty((KV_HEADS, len(row.tokens), DIM), dtype=np.float32)
        for each in set(chains):
            at = np.array([at for at, mine in enumerate(chains) if mine == each])
            result[:, at] = self._content(at, each)
        return result

    def wrong(self, held: Floats) -> Iterable[tuple[int, str]]:
        """The first wrong tokens, each with a complaint."""
        tokens = len(self._row.tokens)
        first = tokens - held.shape[1]
        chains = [self._possible(at) for at in range(first, tokens)]
        for each in set(chains):
            at = np.array([first + place for place, mine in enumerate(chains) if mine == each])
            if not each:
                yield int(at[0]), self._complaint(int(at[0]))
                continue
            mine = held[:, at - first]
            options = self._options(at, each)
            if self._cache.layer in self._cache.sequences[0].unwritten:
                # No page holds the latest step yet.
                options.append(self._options(at, frozenset({()}))[0])
            is_right = np.any([option.agrees(mine) for option in options], axis=0)
            for token in at[~is_right][:1]:
                yield int(token), f"not what its page holds after any of {sorted(each)}"

    def _content(self, at: Indices, chains: frozenset[Chain]) -> Floats:
        options = self._options(at, chains)
        if len(options) == 1 and options[0].is_exact:
            return options[0].numbers
        held = _gathered(self._row, self._cache)[self._part]
        first = len(self._row.tokens) - held.shape[1]
        # Tokens that a window has left cannot be read.
        result = np.full_like(options[0].numbers, np.nan)
        for option in options:
            seen = np.flatnonzero(at >= first)
            mine = held[:, at[seen] - first]
            is_it = _Option(option.numbers[:, seen], option.tolerance).agrees(mine)
            result[:, seen[is_it]] = mine[:, is_it]
        return result

    def _options(self, at: Indices, chains: frozenset[Chain]) -> list["_Option"]:
        numbers = sorted({self._numbers(chain) for chain in chains})
        tokens, layer = self._row.tokens, self._cache.layer
        return [
            _Option(_table_rows(tokens, layer, self._part, each)[:, at], self._tolerance(each))
            for each in numbers
        ]

    def _tolerance(self, formats: tuple[str, ...]) -> float:
        if self._part == "keys" and "q4" in formats:
            return CENTRED
        return EXACT if len(formats) < 2 else QUANTISED_TWICE

    def _possible(self, at: int) -> frozenset[Chain]:
        chains, now = self._row.chains[at], self._now[at]
        if self._cache.layer in self._cache.pool.windows:
            # The pages of rings are not quantised.
            chains = WRITTEN
        return chains if now is None else _ending_with(chains, now)

    def _numbers(self, chain: Chain) -> tuple[str, ...]:
        """The number formats of a chain; a chain that begins with unquantised numbers holds
        those."""
        names = [getattr(page_format_named(name), self._part).name for name in chain]
        return tuple(name for name in names if name != "fp16")

    def _complaint(self, at: int) -> str:
        return f"its page is {self._now[at]}, and may be one of {sorted(self._row.chains[at])}"


def _worst(found: Floats, expected: Floats) -> float:
    """The largest difference, where the expected value is known."""
    known = np.isfinite(expected).all(axis=1)
    differences = np.abs(found[known] - expected[known])
    return float(np.nan_to_num(differences, nan=np.inf).max(initial=0.0))


@lru_cache(maxsize=1000)
def _ending_with(chains: frozenset[Chain], name: str) -> frozenset[Chain]:
    return frozenset(chain for chain in chains if chain[-1] == name)


def _formats_now(cache: PagedKVCache, tokens: int) -> list[str | None]:
    """The page format of each token; None for tokens that a ring has dropped."""
    (sequence,) = cache.sequences
    window = cache.pool.windows.get(cache.layer)
    names = page_formats(cache.pool, cache.layer, sequence)
    if window is None:
        return [names[at // 256] for at in range(tokens)]
    first_held = window.first_held(sequence.layers.written(cache.pool.group_of(cache.layer)))
    return [
        names[window.ring.entry(at // 256)] if at >= first_held else None for at in range(tokens)
    ]


def _wrong_formats(row: Row, cache: PagedKVCache, start: int) -> Iterable[str]:
    """What is wrong with the formats of pages after a step that began at `start`: they have the
    sequence's format, but the page that the step ends in has 16 bits, and so has the one that it
    begins in if that held earlier tokens."""
    if row.full is None or cache.pool.windows.get(cache.layer) is not None:
        return
    names = page_formats(cache.pool, cache.layer, cache.sequences[0])
    expected = [full_format(row.full, page) for page in range(len(names) - 1)] + ["fp16"]
    if start % 256:
        expected[start // 256] = "fp16"
    if names != expected:
        yield f"layer {cache.layer} has pages of {names}, after a step from {start} on"


def _gathered(row: Row, cache: PagedKVCache) -> dict[str, Floats]:
    """Keys and values of the tokens that the next query sees."""
    window, tokens = cache.pool.windows.get(cache.layer), len(row.tokens)
    seen = tokens if window is None else min(tokens, window.size - 1)
    keys, values = cache.keys_and_values()
    whole = {"keys": np.array(keys)[0], "values": np.array(values)[0]}
    return {part: held[:, held.shape[1] - seen :] for part, held in whole.items()}


def _table_rows(tokens: list[int], layer: int, part: str, formats: tuple[str, ...]) -> Floats:
    choose = {"keys": key_rows, "values": value_rows}[part]
    numbers, positions = np.array(tokens, dtype=np.int64), np.arange(len(tokens))
    table = table_after(formats)
    return np.stack([table[choose(numbers, positions, layer, h)] for h in range(KV_HEADS)])


def _state(tokens: list[int]) -> Floats:
    latest = np.array(tokens[-256:], dtype=np.int64)
    weights = DECAY ** np.arange(len(latest))[::-1]
    state: Floats = (weights @ table_after(())[state_rows(latest)]).astype(np.float32)
    return state
