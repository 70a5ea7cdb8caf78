"""Makes the tables of what prompts find cached."""

from collections.abc import Callable, Iterator
from typing import Any

from benches.table_cells import megabytes, millis, seconds, table

Figures = dict[str, Any]


def state_reuse(figures: Figures) -> str:
    """Repeated prompts of models whose caches mlx-lm cannot trim."""
    count = f"{figures['tokens']:,} tokens"
    parted = f"found if the last {figures['other_tokens']:,} differ"
    heads = (
        f"first token of {count}",
        *("cold", "repeated", "repeated, LRUPromptCache", "cold / repeated"),
        *(parted, f"{parted}, LRUPromptCache", "kept"),
    )
    rows = [
        (
            f"`{name}`",
            seconds(of["cold_seconds"]),
            millis(of["repeated_seconds"]),
            millis(of["mlx_lm_repeated_seconds"]),
            f"{of['cold_over_repeated']:,.0f}",
            f"{of['parted_tokens_found']:,}",
            f"{of['mlx_lm_parted_tokens_found']:,}",
            megabytes(of["kept_bytes"]),
        )
        for name, of in figures["files"].items()
    ]
    return table(heads, rows)


def eviction(figures: Figures) -> str:
    """Found tokens by policy: of recurrent states, and of pages."""
    states = [
        (load, f"{int(fitting):,}", *(f"{of[name]:.3f}" for name in ("lru", "worth", "foreseen")))
        for load, fitting, of in _shares_of(figures, "states")
    ]
    pages = [
        (
            load,
            f"{int(fitting):,}",
            *(f"{of[name]:.3f}" for name in ("lru", "lfu", "fifo", "worth", "most")),
        )
        for load, fitting, of in _shares_of(figures, "pages")
    ]
    policies = ("`LeastRecentlyUsed`", "`LeastWorth`")
    others = ("`LeastFrequentlyUsed`", "`FirstInFirstOut`")
    return "\n\n".join(
        (
            table(("load", "states that fit", *policies, "with foresight"), states),
            table(("load", "pages that fit", policies[0], *others, policies[1], "at most"), pages),
        )
    )


def _shares_of(figures: Figures, kind: str) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Each load, how many fit, and the share that each policy finds."""
    loads = {f"{count} agents": of for count, of in figures["agents"].items()}
    if "mooncake" in figures:
        loads["Mooncake, conversations"] = figures["mooncake"]
    for load, of in loads.items():
        for fitting, shares in of[kind].items():
            yield load, fitting, shares


TABLES: dict[str, Callable[[Figures], str]] = {
    each.__name__: each for each in (state_reuse, eviction)
}
