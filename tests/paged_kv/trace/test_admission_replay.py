"""A trace tells which requests were served, and how many would have run with another policy."""

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator

from paged_kv import PagedCacheFactory
from paged_kv.trace.admission_replay import replay_admission
from paged_kv.trace.replay import read_trace
from paged_kv.trace.requests import TracedLoad
from tests.support.zoo import small_model

HEADER = '{"paged_kv_trace": 1, "page_size": 256, "time": 0}'
POOL = ["P 0 0 8000 llama", "B 0 1000 fp16", "G 0 0 0 0 0 0"]


def trace(path: Path, *lines: str) -> Path:
    path.write_text("\n".join([HEADER, *POOL, *lines]) + "\n")
    return path


def served(number: int, prompt: int, answer: int, most: int = 600) -> list[str]:
    """A request that takes 10 ms for its prompt, and as long for each token."""
    arrives = [f"q {number} 0 {prompt} {most}", f"i {number}"]
    return [*arrives, f"+ {10 * (answer + 1)}", f"o {number} {answer}"]


def load(path: Path) -> TracedLoad:
    return TracedLoad(read_trace(path), 256)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])  # without a window, and with one
def test_a_replay_of_a_batch_comes_to_the_recorded_counts(tmp_path: Path, family: str) -> None:
    """Random lengths in few blocks: a request without a window is preempted."""
    path = tmp_path / "trace"
    rng = random.Random(3)
    model = small_model("qwen3", num_hidden_layers=1) if family == "qwen3" else small_model(family)
    count, blocks = rng.randrange(2, 8), rng.randrange(4, 12)
    lengths = [(rng.randrange(20, 700), rng.randrange(5, 400)) for _ in range(count)]
    fitting = [(prompt, min(most, blocks * 256 - prompt - 2)) for prompt, most in lengths]
    prompts = [[rng.randrange(1, 60) for _ in range(prompt)] for prompt, _ in fitting]
    factory = PagedCacheFactory(model, max_bytes=blocks * block_bytes(model), trace=path)
    with factory, closing(BatchGenerator(model)) as generator:
        generator.insert(prompts, max_tokens=[most for _, most in fitting])
        while generator.next_generated():
            pass
    stats = factory.stats()
    events: Any = factory.pool.counts.events
    events.flush()
    recorded = load(path)
    outcome = replay_admission(recorded, "optimistic")
    assert len(recorded.requests) == outcome.requests == count
    assert recorded.preemptions == outcome.preemptions == stats.preemptions
    assert outcome.tokens_recomputed == stats.tokens_recomputed
    assert recorded.running_most == outcome.running_most
    assert outcome.preemptions or family != "qwen3"
    factory.close()


def test_requests_share_what_running_ones_hold(tmp_path: Path) -> None:
    """8 blocks: the second request shares 4 of 5, and the third, of another prompt, none."""
    lines = [*served(0, 1100, 100), *served(1, 1100, 100), "h 1 0 4", *served(2, 1100, 100)]
    order = sorted(lines, key=lambda line: "qhi+o".index(line[0]))
    outcome = replay_admission(load(trace(tmp_path / "trace", *order)), "optimistic")
    assert outcome.running_most == 2
    alone = [line for line in order if line[0] != "h"]
    outcome = replay_admission(load(trace(tmp_path / "alone", *alone)), "optimistic")
    assert outcome.running_most == 1


def block_bytes(model: Any) -> int:
    """Bytes of a block in all layers."""
    factory = PagedCacheFactory(model, max_bytes="1GB")
    factory.can_admit(0)
    return sum(group.block_bytes for group in factory.pool.groups)
