"""Faults to plant where kernels read heads of 512 numbers."""

from typing import Any

from tests.support.planted_faults import BOTH, Fault


def _of_steps(name: str, sound: str, planted: str, said: str = "", **more: Any) -> Fault:
    return Fault(name, "prefill", sound, planted, said, BOTH, queries=9, dim=512, **more)


WIDE_FAULTS = [
    Fault(
        "memory for a tile's weights, and not for the values of a head",
        "decode",
        "OWN = TILE * ROWS > V_DIM ? TILE * ROWS : V_DIM;",
        "OWN = TILE * ROWS;",
        "out of bounds",
        BOTH,
        dim=512,
    ),
    _of_steps(
        "columns of values that another simdgroup has",
        "add_weighted(tile_numbers + sharer * WIDTH,",
        "add_weighted(tile_numbers,",
    ),
    _of_steps(
        "outputs that overlap",
        "output + at * V_DIM + first_column",
        "output + at * V_DIM",
        "race",
    ),
    _of_steps(
        "results of a group that overlap",
        "partials + at * V_DIM + first_column",
        "partials + at * V_DIM",
        "race",
        shares=True,
    ),
    _of_steps(
        "the products of one simdgroup that shares rows for those of all",
        "k < SHARERS; k++",
        "k < 1; k++",
    ),
    _of_steps(
        "the products of other rows",
        "uint first = place.simdgroup / SHARERS * SHARERS;",
        "uint first = 0;",
    ),
    _of_steps(
        "no barrier before products of other simdgroups are added",
        "  threads_meet();\n  uint first = place.simdgroup / SHARERS",
        "  uint first = place.simdgroup / SHARERS",
        "race",
    ),
    _of_steps(
        "queries of the step's first token",
        "query_of(queries + row.step * ulong(strides[2]),",
        "query_of(queries,",
    ),
    _of_steps(
        "rotated tokens as if they were plain",
        "if (slots.is_rotated() && !tile.is_new) {",
        "if (false) {",
        formats=("q8",),
    ),
    _of_steps(
        "no barrier before a tile of codes is loaded",
        "    threads_meet();\n    decode_tile<DIM>",
        "    decode_tile<DIM>",
        "race",
        formats=("q8",),
    ),
    _of_steps(
        "no barrier before a tile of codes is read",
        "slots, place, to);\n    threads_meet();\n    return;",
        "slots, place, to);\n    return;",
        "race",
        formats=("q8",),
    ),
]
