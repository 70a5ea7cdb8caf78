"""What prompts find cached with each eviction policy: python -m benches.eviction [MOONCAKE_FILE]

The prefix index runs without pages (paged_kv/trace/reuse_replay.py). `most` is the most that any
policy could find, as it knows the future. Prompts are those of

    agents      2, 4, 8 and 16 made-up agents at once (paged_kv/trace/agent_load.py), 1,000 requests
    mooncake    a public trace, if its file is given: of https://github.com/kvcache-ai/Mooncake

Pages have 256 tokens. Those that fit are a number of pages an agent, of which the last prompt of a
median session has 555; for Mooncake's trace they are a number in all. Shares are of the prompts'
tokens. All of it takes half an hour or less.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benches.results_file import write_result
from paged_kv.trace.agent_load import AgentLoad, write_agent_load
from paged_kv.trace.public_traces import import_trace
from paged_kv.trace.recorder import PAGE_SIZE
from paged_kv.trace.replay import read_trace
from paged_kv.trace.request_lines import TracedMemory
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.reuse_replay import POLICIES, most_reuse, replay_reuse

AGENTS = (2, 4, 8, 16)
REQUESTS = 1_000
PAGES_AN_AGENT = (150, 300, 450)
MOONCAKE_PAGES = (8_000, 20_000, 50_000)
# A token takes a byte, so that budgets are tokens.
MEMORY = TracedMemory(token_bytes=1, max_bytes=1 << 40)


def shares(load: TracedLoad, pages: int) -> dict[str, float]:
    """The share of the prompts' tokens that each policy finds in so many pages."""
    budget = pages * PAGE_SIZE
    found = {name: replay_reuse(load, policy, budget) for name, policy in POLICIES.items()}
    found["most"] = most_reuse(load, budget)
    return {name: round(reuse.share, 4) for name, reuse in found.items()}


def at_sizes(load: TracedLoad, sizes: list[int]) -> dict[str, dict[str, float]]:
    """Those shares by the number of pages."""
    found = {}
    for pages in sizes:
        found[str(pages)] = shares(load, pages)
        print(f"{pages:>8,} pages", found[str(pages)], flush=True)
    return found


def of_agents(agents: int, folder: Path) -> dict[str, dict[str, float]]:
    trace = folder / f"agents-{agents}"
    write_agent_load(AgentLoad(agents, REQUESTS), MEMORY, trace)
    print(f"{agents} agents")
    load = TracedLoad(read_trace(trace), PAGE_SIZE)
    return at_sizes(load, [agents * pages for pages in PAGES_AN_AGENT])


def of_mooncake(file: Path, folder: Path) -> dict[str, dict[str, float]]:
    trace = folder / "mooncake"
    import_trace("mooncake", file, MEMORY, trace)
    print(file.name)
    return at_sizes(TracedLoad(read_trace(trace), PAGE_SIZE), list(MOONCAKE_PAGES))


def main(files: list[str]) -> None:
    figures: dict[str, Any] = {"requests": REQUESTS, "pages_an_agent": PAGES_AN_AGENT, "agents": {}}
    with TemporaryDirectory() as name:
        for agents in AGENTS:
            figures["agents"][str(agents)] = of_agents(agents, Path(name))
        for file in files:
            figures["mooncake"] = of_mooncake(Path(file), Path(name))
    print(f"written to {write_result('eviction', figures)}")


if __name__ == "__main__":
    main(sys.argv[1:2])
