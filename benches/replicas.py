"""Several servers behind one address, and how their requests are routed: python -m benches.replicas
[--trace FILE]

    simulated      loads on 2, 4 and 16 simulated replicas (benches/simulated_replicas.py), behind
                   `PrefixRouter` and behind Ray Serve's own router, power of two choices: the share
                   of the prompts' tokens that replicas find cached, and the seconds that requests
                   wait for their first token. Caches have 10,000 blocks of 512 tokens in all. With
                   fewer replicas, requests come slower: each replica has the same to do.
                   `one_replica` is what one with all the memory finds
    first_token    measured: seconds to the first text of a stream, of one client, from
                   `paged-kv server` alone and from two replicas behind either router, in turns, on
                   loopback. The model is stdlib-llama, and each prompt is new to all. What is added
                   is the median of differences

Loads are made-up agents, which share their first 20,480 tokens, and a public trace if its file is
given: mooncake_conversation.jsonl of https://github.com/kvcache-ai/Mooncake.
"""

import argparse
import http.client
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any
from unittest.mock import patch

import ray
from ray import serve
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from benches.results_file import write_result
from benches.serving_http import Request, ask, server
from benches.simulated_replicas import (
    BLOCK,
    DECODE,
    PREFILL,
    SHARED_BLOCKS,
    BlockCache,
    SimulatedAnswer,
    SimulatedRequest,
    agents,
    conversations,
    found_tokens,
    simulated_answers,
)
from paged_kv.server.replicas import deployments
from paged_kv.server.replicas.front import PrefixRouter
from tests.support.folders import MODEL_FOLDERS
from tests.support.ray_cluster import ray_cluster

ROUTERS = {"power_of_two": PowerOfTwoChoicesRequestRouter, "prefix": PrefixRouter}

REPLICAS = (2, 4, 16)
BLOCKS = 10_000
AGENT_REQUESTS = 4_000

# The first requests of each side are not counted.
UNCOUNTED, ROUNDS = 6, 200
PROMPT_CHARACTERS, NEW_TOKENS = 400, 4
OPTIONS = {"model": str(MODEL_FOLDERS["stdlib-llama"]), "dtype": "float32", "max_kv_bytes": "200MB"}
SHARED_MACHINE = {"num_replicas": 2, "num_cpus": 0.3}


def main() -> None:
    """Simulate, measure, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    trace = parser.parse_args().trace
    loads = {"agents": agents(AGENT_REQUESTS)}
    if trace is not None:
        loads["conversations"] = conversations(trace)
    figures = {
        "ray": ray.__version__,
        "blocks": BLOCKS,
        "block_tokens": BLOCK,
        "prefill_tokens_per_second": PREFILL,
        "decode_tokens_per_second": DECODE,
        "agents_shared_tokens": SHARED_BLOCKS * BLOCK,
        "simulated": {name: simulated(load) for name, load in loads.items()},
        "first_token": first_token_figures(),
    }
    write_result("replicas", figures)


def simulated(load: Sequence[SimulatedRequest]) -> dict[str, Any]:
    """What the requests of a load get with either router, by the number of replicas."""
    cache = BlockCache(BLOCKS)
    found: dict[str, Any] = {"one_replica": share(load, [found_tokens(cache, r) for r in load])}
    for count in REPLICAS:
        slower = [replace(each, arrives=each.arrives * REPLICAS[-1] / count) for each in load]
        found[str(count)] = {
            name: summary(load, simulated_answers(router, slower, count, BLOCKS), count)
            for name, router in ROUTERS.items()
        }
        print(count, "replicas:", found[str(count)], flush=True)
    return found


def summary(
    load: Sequence[SimulatedRequest], answers: Sequence[SimulatedAnswer], replicas: int
) -> dict[str, Any]:
    """The share that was found, how long requests waited, and how many the busiest replica had, in
    those that it would have if all had the same number."""
    counts = Counter(each.replica for each in answers)
    waited = [each.waited for each in answers]
    return {
        "found": share(load, [each.found for each in answers]),
        "waited_seconds": {
            "mean": round(mean(waited), 3),
            "p50": round(median(waited), 3),
            "p99": round(quantiles(waited, n=100)[98], 3),
        },
        "busiest_over_mean": round(max(counts.values()) * replicas / len(answers), 3),
    }


def share(load: Sequence[SimulatedRequest], found: Sequence[int]) -> float:
    """The part of the prompts' tokens that was found."""
    return round(sum(found) / sum(each.prompt for each in load), 4)


def first_token_figures() -> dict[str, Any]:
    """The median seconds to the first token of each side, and the medians of differences between
    sides that got the same prompt."""
    with served() as addresses:
        rounds = [first_tokens(addresses, number, text) for number, text in enumerate(prompts())]
    counted = rounds[UNCOUNTED:]

    def added(to: str, by: str) -> float:
        return median(each[by] - each[to] for each in counted)

    return {
        "requests_of_each": len(counted),
        "prompt_characters": PROMPT_CHARACTERS,
        "median_seconds": {name: median(each[name] for each in counted) for name in rounds[0]},
        "added_by_ray_serve": added("alone", "power_of_two"),
        "added_by_prefix_router": added("power_of_two", "prefix"),
    }


@contextmanager
def served() -> Iterator[dict[str, tuple[int, str]]]:
    """The ports and paths of a server alone, and of replicas behind either router."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with ray_cluster() as port, server("paged", MODEL_FOLDERS["stdlib-llama"], *options) as alone:
        for name, router in ROUTERS.items():
            with patch.object(deployments, "PrefixRouter", router):
                application = deployments.app(OPTIONS | SHARED_MACHINE)
            serve.run(application, name=name, route_prefix=f"/{name}")
        yield {"alone": (alone, "")} | {name: (port, f"/{name}") for name in ROUTERS}


def prompts() -> list[str]:
    """Pieces of Python's library of which none begins like another."""
    text = Path(http.client.__file__).read_text(encoding="utf-8")
    return [text[40 * number :][:PROMPT_CHARACTERS] for number in range(UNCOUNTED + ROUNDS)]


def first_tokens(addresses: dict[str, tuple[int, str]], number: int, text: str) -> dict[str, float]:
    """Seconds to the first token of a prompt on each side; another one begins each time."""
    turns = deque(addresses)
    turns.rotate(number)
    request = Request(text, NEW_TOKENS)
    return {
        name: ask(port, request, path).first for name in turns for port, path in [addresses[name]]
    }


if __name__ == "__main__":
    main()
