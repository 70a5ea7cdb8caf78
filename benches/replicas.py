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
    router         requests a second that `PrefixRouter` places on 64 simulated replicas, the
                   seconds of `choose_replicas` alone, and the memory of what it knows of prompts

Loads are made-up agents, which share their first 20,480 tokens, and a public trace if its file is
given: mooncake_conversation.jsonl of https://github.com/kvcache-ai/Mooncake. `router` has the
prompts of the last load.
"""

import argparse
import asyncio
import http.client
import json
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles
from time import perf_counter
from typing import Any
from unittest.mock import patch

import ray
from ray import serve
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from benches.results_file import write_result
from benches.serving_http import server
from benches.simulated_replicas import (
    BLOCK,
    DECODE,
    PREFILL,
    SHARED_BLOCKS,
    BlockCache,
    SimulatedAnswer,
    SimulatedReplica,
    SimulatedRequest,
    agents,
    conversations,
    found_tokens,
    made_router,
    pending_request,
    simulated_answers,
)
from paged_kv.server.replicas import deployments
from paged_kv.server.replicas.forwarded_request import ForwardedRequest, Trail
from paged_kv.server.replicas.front import PrefixRouter
from paged_kv.server.replicas.placement import MOST_BEGINNINGS, Placement
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

MANY_REPLICAS = 64
RUNNING_AT_ONCE = 4 * MANY_REPLICAS
PASSES = 3


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
        "router": router_figures(list(loads.values())[-1]),
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


def router_figures(load: Sequence[SimulatedRequest]) -> dict[str, Any]:
    """How fast `PrefixRouter` is, and how large."""
    passes = [asyncio.run(routed(load)) for _ in range(PASSES)]
    chosen = [seconds for _, each in passes for seconds in each]
    beginnings, nbytes = full_placement()
    return {
        "replicas": MANY_REPLICAS,
        "mean_prompt_tokens": round(mean(each.prompt for each in load)),
        "requests_per_second": round(median(len(load) / seconds for seconds, _ in passes)),
        "choose_seconds": {"p50": median(chosen), "p99": quantiles(chosen, n=100)[98]},
        "beginnings": beginnings,
        "bytes": nbytes,
        "bytes_per_beginning": round(nbytes / beginnings, 1),
    }


async def routed(load: Sequence[SimulatedRequest]) -> tuple[float, list[float]]:
    """The seconds in which a router chooses a replica for each request, notes it and sees it
    complete, with `RUNNING_AT_ONCE` before; and those of each choice alone."""
    replicas = [SimulatedReplica(each, 0) for each in range(MANY_REPLICAS)]
    router = made_router(PrefixRouter, replicas, perf_counter)
    pending = [pending_request(str(number), each.trail) for number, each in enumerate(load)]
    running: deque[tuple[str, Any]] = deque()
    seconds, began = [], perf_counter()
    for request in pending:
        asked = perf_counter()
        ((replica,), *_) = await router.choose_replicas(replicas, request)
        seconds.append(perf_counter() - asked)
        router.on_request_routed(request, replica.replica_id, None)
        running.append((request.metadata.internal_request_id, replica.replica_id))
        if len(running) > RUNNING_AT_ONCE:
            name, place = running.popleft()
            router.on_request_completed(place, name)
    return perf_counter() - began, seconds


def full_placement() -> tuple[int, int]:
    """How many beginnings a router knows at most, and the bytes that they take."""
    random, placement = Random("beginnings"), Placement()
    replicas = [str(each) for each in range(MANY_REPLICAS)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2 * MOST_BEGINNINGS // 64):
            digests = tuple(random.getrandbits(64) for _ in range(64))
            request = ForwardedRequest({}, b"", Trail(digests, 64 * 256))
            placement.begin(number, request, replicas[number % MANY_REPLICAS])
            placement.end(number)
        return len(placement), tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


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
    return {name: first_token(*addresses[name], text) for name in turns}


def first_token(port: int, path: str, text: str) -> float:
    """Seconds from sending a request to the first event with text."""
    body = {"prompt": text, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    began = perf_counter()
    connection.request("POST", f"{path}/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first = 0.0
    for line in response:
        if line.startswith(b"data: {") and not first:
            event = json.loads(line.removeprefix(b"data: "))
            first = (perf_counter() - began) if event["choices"][0]["text"] else 0.0
    connection.close()
    assert first, "the stream has no text"
    return first


if __name__ == "__main__":
    main()
