"""One model on one, two and three processes of this machine: bytes on each, and tokens a second.

The processes share this machine's cores and talk over loopback, so the speeds show what agreeing
and MLX's sums cost here, and not what several machines give. Sides run in turns; a speed is the
median of their rounds.

    python -m benches.distributed            # writes benches/results/distributed-*.json
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from tests.support.launched_ranks import launched, output_of
from tests.support.zoo import small_model

SIZES = (1, 2, 3)
ROUNDS = 3
SEQUENCES, PROMPT, TOKENS = 4, 500, 24

# Heads that one, two and three ranks can share.
SHAPE: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "intermediate_size": 768,
    "layer_types": ["full_attention"] * 4,
}


def main() -> None:
    """Launch all sides, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path, help="measure this rank, and write to this folder")
    folder = parser.parse_args().worker
    if folder is not None:
        rank = mx.distributed.init().rank()
        (folder / f"{rank}.json").write_text(json.dumps(measured()))
        return
    rounds = [{size: launch(size) for size in SIZES} for _ in range(ROUNDS)]
    figures = {str(size): summary([each[size] for each in rounds]) for size in SIZES}
    print(json.dumps(figures, indent=2))
    print(write_result("distributed", figures))


def launch(size: int) -> list[dict[str, Any]]:
    """What each of `size` ranks measures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ("-m", "benches.distributed", "--worker", name)
        with launched(folder, size, *command) as processes:
            for rank, process in enumerate(processes):
                if process.wait():
                    raise RuntimeError(output_of(folder, rank))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def measured() -> dict[str, Any]:
    """Decode speed of a batch on this rank, and the bytes that its sequences hold."""
    group = mx.distributed.init()
    model: Any = small_model("llama", **SHAPE)
    if group.size() > 1:
        model.shard(group)
    factory = PagedCacheFactory(model, max_bytes="256MB")
    with factory:
        generator = BatchGenerator(model, stream=mx.default_stream(mx.default_device()))
        prompts = [[(seed + 7 * at) % 100 for at in range(PROMPT)] for seed in range(SEQUENCES)]
        generator.insert(prompts, max_tokens=[TOKENS] * SEQUENCES)
        while not (given := len(generator.next_generated())):
            pass
        began = perf_counter()
        nbytes = 0
        while count := len(generator.next_generated()):
            given += count
            nbytes = max(nbytes, factory.stats().bytes_active)
        seconds = perf_counter() - began
        generator.close()
    return {"tokens_per_s": (given - SEQUENCES) / seconds, "bytes_active": nbytes}


def summary(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The median speed with its least and most, and the bytes on each rank."""
    speeds = sorted(ranks[0]["tokens_per_s"] for ranks in rounds)
    return {
        "tokens_per_s": median(speeds),
        "least": speeds[0],
        "most": speeds[-1],
        "bytes_on_each_rank": [rank["bytes_active"] for rank in rounds[0]],
    }


if __name__ == "__main__":
    main()
