"""What prompts find cached with each eviction policy: python -m benches.eviction [MOONCAKE_FILE]

The prefix index runs without pages (paged_kv/trace/reuse_replay.py). `most` is the most that any
policy could find, as it knows the future. Prompts are those of

    agents      2, 4, 8 and 16 made-up agents at once (paged_kv/trace/agent_load.py), 1,000 requests
    mooncake    a public trace, if its file is given: of https://github.com/kvcache-ai/Mooncake

Pages have 256 tokens. Those that fit are a number of pages an agent, of which the last prompt of a
median session has 555; for Mooncake's trace they are a number in all. `states` are those of
recurrent layers (paged_kv/trace/state_replay.py), so many in all; `foreseen` evicts the one that is
found again last. Shares are of the prompts' tokens. All of it takes half an hour or less. The plot
shows the states of agents: docs/pictures/eviction.svg.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benches.results_file import write_result
from paged_kv.trace.agent_load import AgentLoad, write_agent_load
from paged_kv.trace.public_traces import import_trace
from paged_kv.trace.recorder import PAGE_SIZE
from paged_kv.trace.replay import read_trace
from paged_kv.trace.request_lines import TracedMemory
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.reuse_replay import POLICIES, most_reuse, replay_reuse
from paged_kv.trace.state_replay import foreseen_states, replay_ranked_states

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "eviction.svg"
AGENTS = (2, 4, 8, 16)
REQUESTS = 1_000
PAGES_AN_AGENT = (150, 300, 450)
MOONCAKE_PAGES = (8_000, 20_000, 50_000)
# A quarter of 16 GB holds 27 states of a hybrid of 27 billion parameters.
STATES = (12, 27)
MOONCAKE_STATES = (500, 2_000, 8_000)
# A token takes a byte, so that budgets are tokens.
MEMORY = TracedMemory(token_bytes=1, max_bytes=1 << 40)


def shares(load: TracedLoad, pages: int) -> dict[str, float]:
    """The share of the prompts' tokens that each policy finds in so many pages."""
    budget = pages * PAGE_SIZE
    found = {name: replay_reuse(load, policy, budget) for name, policy in POLICIES.items()}
    found["most"] = most_reuse(load, budget)
    return {name: round(reuse.share, 4) for name, reuse in found.items()}


def shares_of_states(load: TracedLoad, states: int) -> dict[str, float]:
    """The share of the prompts' tokens before the states that they find, where so many fit."""
    found = {
        name: replay_ranked_states(load, states, policy)
        for name, policy in POLICIES.items()
        if name in ("lru", "worth")
    }
    found["foreseen"] = foreseen_states(load, states)
    return {name: round(reuse.share, 4) for name, reuse in found.items()}


Shares = dict[str, dict[str, dict[str, float]]]
"""By "pages" or "states", by how many fit, and by policy."""


def at_sizes(load: TracedLoad, sizes: Iterable[int], states: Iterable[int]) -> Shares:
    """Those shares by the numbers of pages and of states."""
    found: Shares = {"states": {}, "pages": {}}
    for kind, counts, shares_with in (
        ("states", states, shares_of_states),
        ("pages", sizes, shares),
    ):
        for count in counts:
            found[kind][str(count)] = shares_with(load, count)
            print(f"{count:>8,} {kind}", found[kind][str(count)], flush=True)
    return found


def of_agents(agents: int, folder: Path) -> Shares:
    trace = folder / f"agents-{agents}"
    write_agent_load(AgentLoad(agents, REQUESTS), MEMORY, trace)
    print(f"{agents} agents")
    load = TracedLoad(read_trace(trace), PAGE_SIZE)
    return at_sizes(load, [agents * pages for pages in PAGES_AN_AGENT], STATES)


def of_mooncake(file: Path, folder: Path) -> Shares:
    trace = folder / "mooncake"
    import_trace("mooncake", file, MEMORY, trace)
    print(file.name)
    return at_sizes(TracedLoad(read_trace(trace), PAGE_SIZE), MOONCAKE_PAGES, MOONCAKE_STATES)


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


def main(files: list[str]) -> None:
    figures: dict[str, Any] = {"requests": REQUESTS, "pages_an_agent": PAGES_AN_AGENT, "agents": {}}
    with TemporaryDirectory() as name:
        for agents in AGENTS:
            figures["agents"][str(agents)] = of_agents(agents, Path(name))
        for file in files:
            figures["mooncake"] = of_mooncake(Path(file), Path(name))
    print(f"written to {write_result('eviction', figures)}")
    draw(figures["agents"])
    print("drawn:", PICTURE.name)


if __name__ == "__main__":
    main(sys.argv[1:2])
