"""Times decode of rows that share pages: python -m benches.shared_pages

One layer of 8 key-value heads of 128 and 32 query heads, and the CPU kernels on all cores. The
sides take turns in one process: the same kernels told which pages rows share (together), and not
(apart). Figures are medians of their repetitions, and ratios are medians of ratios within a turn.

    N rows behind T   one query token for each row, behind a shared prompt and with tokens of its
                      own. Bytes of pages are what the kernels count
    N rows of T       rows that share nothing
    in pairs          together, with avx512bf16, where the machine has it and pages are bfloat16
    tree              the look itself, for 64 rows: of tables of which none has changed since the
                      last step, of which one has, and of new ones; and an array of all tables,
                      which the kernels need besides
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import mlx.core as mx

from benches.one_layer import DIM, DTYPES, QUERY_HEADS, SCALE, new_pages, normal
from benches.results_file import write_result
from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.pages.attention_metadata import (
    Attention,
    AttentionMetadata,
    BlockTables,
    Table,
)
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.number_format import WORD
from paged_kv.kernels.pages.page_format import FP16, PAGE_SIZE

OWN = PAGE_SIZE
PAIRS = "avx512bf16"
# Rows, and tokens of the prompt that they share.
SHARED = ((16, 8 * 1024), (8, 32 * 1024), (16, 2 * 1024), (32, 2 * 1024))
UNSHARED = ((16, 2 * 1024), (1, 32 * 1024))
TREE_ROWS, TREE_PAGES = 64, 32


def tables_of(rows: int, shared_pages: int, own_pages: int) -> tuple[Table, ...]:
    """The block tables of rows behind so many shared pages."""
    own = [
        range(shared_pages + own_pages * row, shared_pages + own_pages * (row + 1))
        for row in range(rows)
    ]
    return tuple((*range(shared_pages), *each) for each in own)


def filled_pages(backend: NativeBackend, count: int, dtype: mx.Dtype) -> LayerPages:
    pages = new_pages(dtype, backend)
    pages.map_slab(0, count, FP16)
    shape = pages.page(0).shape
    for page in range(count):
        numbers = mx.random.normal((shape[0] * shape[1],)).astype(dtype)
        pages.load({page: numbers.view(WORD).reshape(shape)})
    return pages


def apart(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same batch, of which kernels do not learn what rows share."""
    copy = replace(metadata)
    copy.__dict__["shared_pages"] = None
    return copy


def decode(
    backend: NativeBackend, rows: int, tables: tuple[Table, ...], dtype: mx.Dtype
) -> dict[str, Any]:
    used = {page for table in tables for page in table}
    pages = filled_pages(backend, len(used), dtype)
    lengths = tuple(len(table) * PAGE_SIZE for table in tables)
    metadata = AttentionMetadata(BlockTables(tables), lengths, (0,) * rows)
    queries = normal(rows, QUERY_HEADS, 1, DIM, dtype=dtype)

    def attend(batch: AttentionMetadata) -> Callable[[], None]:
        return lambda: mx.eval(pages.attend(queries, batch, Attention(SCALE)))

    library, default = backend.library, backend.library.instruction_set

    def in_pairs() -> None:
        library.use_instruction_set(PAIRS)
        attend(metadata)()
        library.use_instruction_set(default)

    sides = [attend(metadata), attend(apart(metadata))]
    if dtype == mx.bfloat16 and PAIRS in library.instruction_sets:
        sides.append(in_pairs)
    read = []
    for side in sides[:2]:
        before = backend.library.page_bytes_read()
        side()
        read.append(backend.library.page_bytes_read() - before)
    together, alone, *paired = in_turns(*sides, repetitions=21)
    held = len(used) * pages.page_bytes(FP16)
    figures = (
        {}
        if not paired
        else {"in_pairs_seconds": median(paired[0]), "in_pairs_times": ratio(alone, paired[0])}
    )
    return figures | {
        "together_seconds": median(together),
        "apart_seconds": median(alone),
        "times": ratio(alone, together),
        "page_bytes": held,
        "together_bytes": read[0],
        "apart_bytes": read[1],
        "bytes_over_pages": read[0] / held,
    }


def tree() -> dict[str, float]:
    """Seconds of a look, and of what surrounds it."""
    tables = BlockTables(tables_of(TREE_ROWS, TREE_PAGES, 1))
    changed = [*tables[:-1], (*tables[-1][:-1], 1 << 20)]
    assert tables.shared_pages is not None

    def look() -> None:
        del tables.__dict__["shared_pages"]
        assert tables.shared_pages is not None

    def one() -> None:
        assert tables.after(changed).shared_pages is not None

    sides = (look, lambda: tables.after(list(tables)), one, lambda: BlockTables(list(tables)).array)
    names = ("look", "nothing_changed", "one_changed", "array")
    times = in_turns(*sides, repetitions=501)
    return {f"{name}_seconds": median(each) for name, each in zip(names, times, strict=True)}


def main() -> None:
    mx.random.seed(0)
    library, reason = load_native_library()
    assert library is not None, reason
    backend = NativeBackend(library)
    figures: dict[str, Any] = {
        "instruction_set": library.instruction_set,
        "own_tokens": OWN,
        "tree_rows": TREE_ROWS,
        "tree_pages": TREE_PAGES,
        "tree": tree(),
    }
    for name, dtype in DTYPES.items():
        of = figures[name] = {}
        for rows, tokens in SHARED:
            tables = tables_of(rows, tokens // PAGE_SIZE, OWN // PAGE_SIZE)
            of[f"{rows}_rows_behind_{tokens}"] = decode(backend, rows, tables, dtype)
        for rows, tokens in UNSHARED:
            tables = tables_of(rows, 0, (tokens + OWN) // PAGE_SIZE)
            of[f"{rows}_row{'s' * (rows > 1)}_of_{tokens}"] = decode(backend, rows, tables, dtype)
    write_result("shared_pages", figures)


if __name__ == "__main__":
    main()
