"""Faults to plant where groups of sequences read the pages that they share."""

from tests.planted_faults import BOTH, Fault


def _fault(name: str, sound: str, planted: str, said: str = "", queries: int = 1) -> Fault:
    operation = "merge" if "places" in sound else "prefill"
    return Fault(name, operation, sound, planted, said, BOTH, queries=queries, shares=True)


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
]
