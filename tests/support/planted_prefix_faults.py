"""Faults to plant where groups of sequences read the pages that they share."""

from typing import Any

from tests.support.planted_faults import BOTH, Fault


def _fault(name: str, sound: str, planted: str, said: str = "", queries: int = 1) -> Fault:
    operation = "merge" if "places" in sound else "prefill"
    return Fault(name, operation, sound, planted, said, BOTH, queries=queries, shares=True)


def _of_latents(name: str, sound: str, planted: str, said: str = "", **more: Any) -> Fault:
    return Fault(name, "latent", sound, planted, said, BOTH, shares=True, **more)


PREFIX_FAULTS = [
    _fault(
        "a sequence left out of its group",
        "place >= 0, sequence >= 0, 0, 0}",
        "place >= 0, sequence > 1, 0, 0}",
    ),
    _fault(
        "a page left out of a group",
        "uint(rows.group[0]) * PAGE_SIZE",
        "uint(rows.group[0] + 1) * PAGE_SIZE",
    ),
    _fault(
        "shared pages that a sequence reads again",
        "first = larger(first, uint(row[PREFIX_TOKENS]));",
        "",
    ),
    _fault(
        "shared pages that a step of drafts reads again",
        "first = larger(first, uint(row[PREFIX_TOKENS]));",
        "",
        queries=3,
    ),
    _fault(
        "results of a group that are not merged",
        "uint places = uint(row[PLACES]);",
        "uint places = row[PLACES] > 1 ? 1 : 0;",
    ),
    _fault(
        "results of another sequence",
        "uint(row[FIRST_PLACE]) * ulong(queries)",
        "(row[PLACES] ? 0u : 1u) * ulong(queries)",
    ),
    _fault(
        "pages of a sequence outside the group",
        "group[2] < 0 ? 0 : uint(group[2])",
        "0",
    ),
    _fault(
        "a group without sequences that writes nothing",
        "if (!row.has_place) continue;",
        "if (!row.is_there) continue;",
        "unwritten",
    ),
    _fault(
        "sequences of a group that write the same place",
        "QueryRow row = {uint(sequence), uint(place),",
        "QueryRow row = {uint(sequence), uint(place) / 2,",
        "race",
    ),
    _fault(
        "a place behind the results",
        "QueryRow row = {uint(sequence), uint(place),",
        "QueryRow row = {uint(sequence), uint(place) + 64,",
        "out of bounds",
    ),
    _fault(
        "tokens of a shared page behind a sequence's last",
        "row.end = pages.parameter(CAUSAL) ? position + 1",
        "row.end = pages.parameter(CAUSAL) ? position + 256",
    ),
    _fault(
        "no barrier before a tile of a group is loaded",
        "  threads_meet();\n  for (uint i = place.index;",
        "  for (uint i = place.index;",
        "race",
    ),
    _of_latents(
        "a sequence left out of its group of latents",
        "place >= 0, sequence >= 0, 0, 0}",
        "place >= 0, sequence > 1, 0, 0}",
    ),
    _of_latents(
        "shared latents that a sequence reads again",
        "first = larger(first, uint(row[PREFIX_TOKENS]));",
        "",
    ),
    _of_latents(
        "latents of a sequence outside the group",
        "group[2] < 0 ? 0 : uint(group[2])",
        "0",
    ),
    _of_latents(
        "no barrier before a tile of latents is loaded",
        "  threads_meet();\n  decode_tile<K_DIM>",
        "  decode_tile<K_DIM>",
        "race",
    ),
    _of_latents(
        "no barrier before a tile of latents is read",
        "place, to + K_DIM);\n  threads_meet();",
        "place, to + K_DIM);",
        "race",
    ),
    _of_latents(
        "no barrier before products of other simdgroups are added",
        "  threads_meet();\n  uint first = place.simdgroup / SHARERS",
        "  uint first = place.simdgroup / SHARERS",
        "race",
    ),
    _of_latents(
        "the products of one simdgroup for those of all",
        "k < SHARERS; k++",
        "k < 1; k++",
    ),
    _of_latents(
        "position queries of a group in another base",
        "logits[i] *= LOG2_E;",
        "logits[i] *= 1.0f;",
    ),
    _of_latents(
        "columns of latents that another simdgroup has",
        "add_weighted(tile_numbers + sharer * WIDTH,",
        "add_weighted(tile_numbers,",
    ),
    _of_latents(
        "a group of latents without sequences that writes nothing",
        "if (!own[k].has_place) continue;",
        "if (!own[k].is_there) continue;",
        "unwritten",
    ),
    _of_latents(
        "results of latents that overlap",
        "partials + to * K_DIM + sharer * WIDTH",
        "partials + to * K_DIM",
        "race",
    ),
]
