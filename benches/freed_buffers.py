"""What a limit on MLX's freed buffers costs and saves: python -m benches.freed_buffers

Two llamas in float32 compute prompts of 16 to 2,048 tokens, one step each, and decode them in
batches of 1 to 8: stdlib-llama, and a random one of hidden size 1024. Lengths are log-uniform, and
drawn from one seed. Nothing calls `mx.clear_cache`, as mlx-lm does after each prompt step, so that
only the limit bounds what MLX keeps.

All limits take turns in one process. "step" is `freed_buffers_limit`, the limit of the server. A
turn notes its processor time, which other processes hardly change. After each step it notes the
bytes that MLX keeps of freed buffers, those that it holds, and those resident, the last two beyond
the beginning of the turn. Rates are beside those of no limit, as the median of the ratios within a
turn; bytes are the most of all turns.
"""

import gc
import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from mlx_lm import load

from benches.results_file import write_result
from paged_kv import PagedCacheFactory, embedded_model
from paged_kv.integrations.bench.turns import ratio
from paged_kv.server.engine.freed_buffers import freed_buffers_limit
from tests.support.zoo import small_model

SEED = 0
STEP, SHORTEST = 2_048, 16
POOL_BYTES = 256 << 20
# Prompts of a turn, and tokens that are decoded behind each.
PROMPTS, DECODED = {"stdlib-llama": 16, "llama of hidden size 1024": 6}, 8
REPETITIONS = 5
NO_LIMIT = 1 << 50
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
}


def models() -> dict[str, Any]:
    """Both models."""
    small = load(embedded_model())[0]
    small.set_dtype(mx.float32)
    mx.eval(small.parameters())
    return dict(zip(PROMPTS, (small, small_model("llama", **WIDE)), strict=True))


def limits(model: Any) -> dict[str, int]:
    """The limits by name, in bytes; the last one is none."""
    step = freed_buffers_limit(model, STEP)
    return {
        "0": 0,
        "a quarter of step": step // 4,
        "step": step,
        "64 MB": 64_000_000,
        "256 MB": 256_000_000,
        "1 GB": 1_000_000_000,
        "none": NO_LIMIT,
    }


class Load:
    """The steps of mixed lengths, under one limit.

    Attributes:
        most: the most bytes after any step, of all turns.
    """

    def __init__(self, factory: PagedCacheFactory, model: Any, prompts: int, limit: int) -> None:
        self._factory = factory
        self._model = model
        self._limit = limit
        rng = random.Random(SEED)
        self._lengths = [
            round(SHORTEST * (STEP / SHORTEST) ** rng.random()) for _ in range(prompts)
        ]
        self.tokens = sum(self._lengths) + DECODED * prompts
        self.most = {"active_bytes": 0, "cache_bytes": 0, "resident_bytes": 0}

    def seconds(self) -> float:
        """Compute all steps; nothing that another turn left is kept. Returns the processor time."""
        gc.collect()
        self._factory.pool.clear()
        mx.set_cache_limit(self._limit)
        mx.reset_peak_memory()
        began = process_time()
        active, resident = mx.get_active_memory(), resident_bytes()
        for _ in self._steps():
            self._note("active_bytes", mx.get_peak_memory() - active)
            self._note("cache_bytes", mx.get_cache_memory())
            self._note("resident_bytes", resident_bytes() - resident)
        return process_time() - began

    def _note(self, name: str, nbytes: int) -> None:
        self.most[name] = max(self.most[name], nbytes)

    def _steps(self) -> Iterator[None]:
        rng, lengths = random.Random(SEED), list(self._lengths)
        while lengths:
            rows = [lengths.pop() for _ in range(min(len(lengths), rng.randint(1, 8)))]
            caches = [self._factory.make_cache() for _ in rows]
            for cache, length in zip(caches, rows, strict=True):
                self._model(mx.ones((1, length), mx.int32), cache=cache)
                mx.eval([layer.state for layer in cache])
                yield
            batch = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
            for _ in range(DECODED):
                mx.eval(self._model(mx.ones((len(rows), 1), mx.int32), cache=batch))
                yield


def resident_bytes() -> int:
    """What Linux says of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measured(name: str, model: Any) -> dict[str, Any]:
    """All limits with one model."""
    factory = PagedCacheFactory(model, max_bytes=POOL_BYTES)
    allowed = limits(model)
    loads = [Load(factory, model, PROMPTS[name], limit) for limit in allowed.values()]
    # The first turns load and compile.
    rounds = [[load.seconds() for load in loads] for _ in range(1 + REPETITIONS)][1:]
    times = [list(column) for column in zip(*rounds, strict=True)]
    factory.close()
    return {
        "step_bytes": allowed["step"],
        "tokens": loads[0].tokens,
        "tokens_per_processor_second": loads[0].tokens / median(times[-1]),
        "limits": {
            limit: {"rate_over_no_limit": ratio(times[-1], taken), **load.most}
            for limit, taken, load in zip(allowed, times, loads, strict=True)
        },
    }


def main() -> None:
    figures = {
        "blas": BLAS,
        "repetitions": REPETITIONS,
        "models": {name: measured(name, model) for name, model in models().items()},
    }
    print(json.dumps(figures, indent=2))
    print("written to", write_result("freed_buffers", figures).name)


if __name__ == "__main__":
    main()
