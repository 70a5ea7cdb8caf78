"""What prompts find cached with each eviction policy:
python -m benches.eviction [MOONCAKE_FILE] [--duels]

The prefix index runs without pages (benches/cached_prompts.py). `most` is the most that any
policy could find, as it knows the future. Prompts are those of

    agents      2, 4, 8 and 16 made-up agents at once (benches/page_loads.py), 1,000 requests
    mooncake    a public trace, if its file is given: of https://github.com/kvcache-ai/Mooncake

Pages have 256 tokens. Those that fit are a number of pages an agent, of which the last prompt of a
median session has 555; for Mooncake's trace they are a number in all. `states` are those of
recurrent layers, so many in all; `foreseen` evicts the one that is found again last. Shares are of
the prompts' tokens. All of it takes half an hour or less. The plot shows the states of agents:
docs/pictures/eviction.svg.

With --duels, loads of 60,000 pages run through the index with `LeastRecentlyUsed`, with
`LeastWorth`, and with `BetterOfTwo`, which lets these two duel: made-up ones, and a trace such as
Mooncake's synthetic_trace.jsonl. Shares are of the prompts' pages. That takes ten minutes of one
core, the made-up loads alone three.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benches.cached_prompts import (
    Cache,
    ForeseenPages,
    ForeseenStates,
    IndexedPages,
    RankedStates,
    States,
    replay_states,
)
from benches.page_loads import DUEL_LOADS, Pages, Prompt, agent_prompts, duel_load, traced_prompts
from benches.results_file import write_result
from paged_kv.integrations.replay.trace_command import POLICIES
from paged_kv.kernels.pages.page_format import PAGE_SIZE

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "eviction.svg"
AGENTS = (2, 4, 8, 16)
REQUESTS = 1_000
PAGES_AN_AGENT = (150, 300, 450)
MOONCAKE_PAGES = (8_000, 20_000, 50_000)
# A quarter of 16 GB holds 27 states of a hybrid of 27 billion parameters.
STATES = (12, 27)
MOONCAKE_STATES = (500, 2_000, 8_000)
DUEL_SIZES, TRACED_DUEL_SIZES = (300, 1_000), (2_000, 4_000, 8_000, 12_000, 20_000)
DUELLISTS = {"lru": "lru", "worth": "worth", "better": "auto"}


def shares(prompts: Sequence[Prompt], pages: int) -> dict[str, float]:
    """The share of the prompts' tokens that each policy finds in so many pages."""
    paths = [prompt.pages for prompt in prompts]
    caches: dict[str, Cache] = {
        **{name: IndexedPages(pages, policy) for name, policy in POLICIES.items()},
        "most": ForeseenPages(pages, paths),
    }
    return {name: _share(prompts, sum(map(each.serve, paths))) for name, each in caches.items()}


def shares_of_states(prompts: Sequence[Prompt], states: int) -> dict[str, float]:
    """The share of the prompts' tokens before the states that they find, where so many fit."""
    paths = [prompt.pages for prompt in prompts]
    kept: dict[str, States] = {
        **{name: RankedStates(states, POLICIES[name]) for name in ("lru", "worth")},
        "foreseen": ForeseenStates(states, paths),
    }
    return {name: _share(prompts, replay_states(each, paths)) for name, each in kept.items()}


def _share(prompts: Sequence[Prompt], pages: int) -> float:
    return round(pages * PAGE_SIZE / sum(prompt.tokens for prompt in prompts), 4)


Shares = dict[str, dict[str, dict[str, float]]]
"""By "pages" or "states", by how many fit, and by policy."""


def at_sizes(prompts: Sequence[Prompt], sizes: Iterable[int], states: Iterable[int]) -> Shares:
    """Those shares by the numbers of pages and of states."""
    found: Shares = {"states": {}, "pages": {}}
    for kind, counts, shares_with in (
        ("states", states, shares_of_states),
        ("pages", sizes, shares),
    ):
        for count in counts:
            found[kind][str(count)] = shares_with(prompts, count)
            print(f"{count:>8,} {kind}", found[kind][str(count)], flush=True)
    return found


def draw(agents: dict[str, Shares]) -> None:
    """Draw what agents find by the number of agents, a panel for each number of states."""
    names = {"foreseen": "with foresight", "worth": "LeastWorth", "lru": "LeastRecentlyUsed"}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "eviction", "font.size": 8}):
        figure = Figure(figsize=(9.6, 3.2), layout="constrained", facecolor="white")
        for axes, states in zip(figure.subplots(1, len(STATES)), STATES, strict=True):
            for name, label in names.items():
                found = [of["states"][str(states)][name] for of in agents.values()]
                axes.plot(list(agents), found, marker="o", label=label)
            axes.set(title=f"{states} states", xlabel="agents", ylabel="found", ylim=(0, 1))
        axes.legend(loc="lower left")
        figure.savefig(PICTURE, metadata={"Date": None})


def duel(prompts: Sequence[Pages], sizes: Iterable[int]) -> dict[str, dict[str, float]]:
    """The share of the prompts' pages by how many fit, and by policy."""
    found = {}
    for capacity in sizes:
        caches = {name: IndexedPages(capacity, POLICIES[key]) for name, key in DUELLISTS.items()}
        found[str(capacity)] = {
            name: round(sum(map(each.serve, prompts)) / sum(map(len, prompts)), 4)
            for name, each in caches.items()
        }
        print(f"{capacity:>8,} pages", found[str(capacity)], flush=True)
    return found


def duels(files: Sequence[Path]) -> dict[str, Any]:
    """What prompts of made-up loads and of traces find while two policies duel."""
    found = {name: duel(duel_load(load), DUEL_SIZES) for name, load in DUEL_LOADS.items()}
    for file in files:
        paths = [prompt.pages for prompt in traced_prompts(file)]
        found[file.stem] = duel(paths, TRACED_DUEL_SIZES)
    return found


def eviction(files: Sequence[Path]) -> dict[str, Any]:
    """What prompts of agents and of a trace find with each policy."""
    figures: dict[str, Any] = {"requests": REQUESTS, "pages_an_agent": PAGES_AN_AGENT, "agents": {}}
    for agents in AGENTS:
        print(f"{agents} agents")
        sizes = [agents * pages for pages in PAGES_AN_AGENT]
        prompts = agent_prompts(agents, REQUESTS)
        figures["agents"][str(agents)] = at_sizes(prompts, sizes, STATES)
    for file in files:
        figures["mooncake"] = at_sizes(traced_prompts(file), MOONCAKE_PAGES, MOONCAKE_STATES)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what eviction policies keep.")
    parser.add_argument("files", nargs="*", type=Path, metavar="MOONCAKE_FILE")
    parser.add_argument("--duels", action="store_true", help="measure those instead")
    arguments = parser.parse_args()
    if arguments.duels:
        write_result("duels", duels(arguments.files))
        return
    figures = eviction(arguments.files)
    write_result("eviction", figures)
    draw(figures["agents"])


if __name__ == "__main__":
    main()
