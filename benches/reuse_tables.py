"""Makes the tables of what prompts find cached."""

from collections.abc import Callable, Iterator
from typing import Any

from benches.table_cells import count, megabytes, micros, millis, seconds, table

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


def duels(figures: Figures) -> str:
    """The share of the prompts' pages that each policy finds, and that the duel of the two does."""
    rows = [
        (name.replace("_", " "), f"{int(fitting):,}", *(f"{of[each]:.3f}" for each in _DUEL))
        for name, sizes in figures.items()
        for fitting, of in sizes.items()
    ]
    policies = ("`LeastRecentlyUsed`", "`LeastWorth`", "`BetterOfTwo`")
    return table(("load", "pages that fit", *policies), rows)


_DUEL = ("lru", "worth", "better")


def replicas(figures: Figures) -> str:
    """What prompts find on replicas with either router, and what routing costs."""
    routers = ("power_of_two", "prefix")
    found = []
    for load, of in figures["simulated"].items():
        for number in [each for each in of if each != "one_replica"]:
            shares = [f"{of[number][router]['found']:.3f}" for router in routers]
            waits = [_waits(of[number][router]["waited_seconds"]) for router in routers]
            found.append((_LOADS[load], number, *shares, f"{of['one_replica']:.3f}", *waits))
    one, two = "Serve's router", "`PrefixRouter`"
    waited = "first token, mean / p50 / p99"
    heads = ("load", "replicas, simulated", f"found, {one}", f"found, {two}")
    limit = "one replica with all memory"
    return "\n\n".join(
        (
            table((*heads, limit, f"{waited}, {one}", f"{waited}, {two}"), found),
            table(
                (f"Ray Serve {figures['ray']}", "measured"),
                [*_first_token_rows(figures["first_token"]), *_router_rows(figures["router"])],
            ),
        )
    )


_LOADS = {"agents": "made-up agents", "conversations": "Mooncake, conversations"}


def _waits(waited: dict[str, float]) -> str:
    return " / ".join(f"{waited[name]:.2f}" for name in ("mean", "p50", "p99")) + " s"


def _first_token_rows(of: Figures) -> Iterator[tuple[str, str]]:
    for name, label in (
        ("alone", "`paged-kv server` alone"),
        ("power_of_two", "2 replicas, Serve's router"),
        ("prefix", "2 replicas, `PrefixRouter`"),
    ):
        yield f"first token of one client, p50: {label}", millis(of["median_seconds"][name])
    yield "added by Ray Serve, p50", millis(of["added_by_ray_serve"])
    yield "added by `PrefixRouter`, p50", millis(of["added_by_prefix_router"])


def _router_rows(of: Figures) -> Iterator[tuple[str, str]]:
    choice = [micros(1e9 * of["choose_seconds"][name]) for name in ("p50", "p99")]
    yield f"a choice among {of['replicas']} replicas alone, p50 / p99", " / ".join(choice)
    yield "requests that it places in a process, a second", count(of["requests_per_second"])
    yield f"its memory with {of['beginnings']:,} beginnings of prompts", megabytes(of["bytes"])


TABLES: dict[str, Callable[[Figures], str]] = {
    each.__name__: each for each in (state_reuse, eviction, duels, replicas)
}
