"""The Python time of a step, with mlx-lm's caches and with pages: python -m benches.host_cost

A decode step of a small llama of 24 layers is built but not computed, in turns on both kinds of
caches: a GPU would wait for this. Kernels only make arrays here ("metal", "cuda"). "metal,
recorded" calls the real `mx.fast.metal_kernel`, which MLX takes without a GPU while it exports a
function: mlx-lm's step is recorded in the same way. "metal, compiled" and "cuda, compiled" repeat
recorded steps, in which each kernel is one operation of MLX's graph. Figures are microseconds of
the calling thread's time a layer, medians, and medians of the ratios within a turn. The CPU's
kernels are left out: they compute each layer while the step is built. Rows of compiled steps also
have:

    uncompiled_microseconds    the same step, taken by Python
    recording_steps            what a recording costs, in such steps
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from benches.models import filled
from benches.results_file import write_result
from paged_kv import PagedCacheFactory, PagedKVCache
from paged_kv.integrations.bench.turns import ratio, spread
from paged_kv.integrations.compiled import recordings
from paged_kv.kernels import backends
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.gpu.kernels import DONE, Chain
from paged_kv.pool.page_pool import PagePool

LAYERS, KV_HEADS, HEAD_DIM = 24, 2, 64
BACKENDS = ("metal", "metal, compiled", "metal, recorded", "cuda", "cuda, compiled")
CONTEXTS, BATCHES, TURNS, RECORDINGS = (300, 8192), (1, 8), 60, 7
# Of a side in a turn, the last one counts: a run takes the same step again and again, and the first
# finds a processor's caches full of what the other side did.
STEPS_OF_A_TURN = 3

Step = Callable[[], float]


def small_llama(layers: int = LAYERS) -> Any:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=14,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    model = llama.Model(args)
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model


class ArrayMaker:
    """As `mx.fast.metal_kernel` and `cuda_kernel`; a call makes arrays of the asked shapes.

    Attributes:
        launches: how many calls there were.
        characters: of the text of each kernel, by name.
        inputs: of the calls, which a graph of MLX's would hold: else they were freed in the step.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.characters: dict[str, int] = {}
        self.inputs: list[list[mx.array]] = []

    def __call__(self, *, name: str, source: str, header: str, **_: Any) -> Callable[..., Any]:
        self.characters[name] = len(source) + len(header)

        def kernel(
            *, inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any
        ) -> list[mx.array]:
            self.launches += 1
            self.inputs.append(inputs)
            return list(map(mx.zeros, output_shapes, output_dtypes))

        return kernel

    def call(self, build: Callable[[mx.array], float], tokens: mx.array) -> float:
        """What `build` returns for these tokens."""
        return build(tokens)


class GraphMaker(ArrayMaker):
    """As `ArrayMaker`, but a call is one operation of MLX's graph with the kernel's inputs and
    outputs, as a compiled step has it. MLX's own kernels cannot be compiled without a GPU."""

    def __call__(self, **text: Any) -> Callable[..., Any]:
        super().__call__(**text)

        def kernel(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> Any:
            self.launches += 1
            outputs = list(map(mx.zeros, output_shapes, output_dtypes))
            return mx.depends(outputs, inputs)

        return kernel


class RecordedMaker(ArrayMaker):
    """`mx.fast.metal_kernel` while a function is exported; makes arrays otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.is_recording = False

    def __call__(self, **text: Any) -> Callable[..., Any]:
        made = super().__call__(**text)
        real: Any = mx.fast.metal_kernel(**text)

        def kernel(**arguments: Any) -> Any:
            if not self.is_recording:
                return made(**arguments)
            self.launches += 1
            return real(**arguments)

        return kernel

    def call(self, build: Callable[[mx.array], float], tokens: mx.array) -> float:
        """What `build` returns while a function is exported."""
        returned: list[float] = []

        def exported(inputs: mx.array) -> mx.array:
            returned.append(build(inputs))
            return inputs + 1

        self.is_recording = True
        try:
            mx.export_function(lambda _: None, exported, tokens)
        finally:
            self.is_recording = False
        return returned[-1]


@contextmanager
def backend(name: str, maker: ArrayMaker) -> Iterator[None]:
    """Let pools made within use a backend whose kernels do nothing, and are not checked."""
    new = partial(GpuBackend, name.partition(",")[0], maker)
    unchecked = patch.dict("os.environ", PAGED_KV_CERTIFY="0")
    with unchecked, patch.object(backends, "_best", new):
        yield


def step(model: Any, caches: list[Any], batch: int, maker: ArrayMaker) -> Step:
    """A step of a token a row. Caches of mlx-lm's are then put back, and the next kernel waits for
    nothing: nothing of the step is computed."""
    tokens = mx.ones((batch, 1), mx.int32)
    first = caches[0]
    stock = [] if isinstance(first, PagedKVCache) else caches

    def build(inputs: mx.array) -> float:
        # Malloc sorts what earlier steps freed at the next large request, so not within the time.
        bytearray(1 << 16)
        began = time.thread_time()
        logits = model(inputs, cache=caches)
        took = time.thread_time() - began
        del logits  # not before: caches of mlx-lm's keep most of their graph alive themselves
        return took

    def seconds() -> float:
        before = [_attributes(cache) for cache in stock]
        took = maker.call(build, tokens)
        maker.inputs.clear()
        for cache, attributes in zip(stock, before, strict=True):
            vars(cache).update(attributes)
        if isinstance(first, PagedKVCache):
            _wait_for_nothing(first.pool)
        return took

    return seconds


def _wait_for_nothing(pool: PagePool) -> None:
    """Let no kernel wait for the graph of an earlier step, which would grow."""
    done = mx.zeros(DONE.shape, DONE.dtype)
    mx.eval(done)
    for pages in (pages for group in pool.groups for pages in group.pages.values()):
        if isinstance(pages.kept, Chain):
            pages.kept.latest = done


def _attributes(cache: Any) -> dict[str, Any]:
    """The attributes of a cache, with arrays that its later steps do not change."""
    return {
        name: mx.array(value) if isinstance(value, mx.array) else value
        for name, value in vars(cache).items()
    }


def measured(name: str, batch: int, context: int) -> dict[str, Any]:
    """One backend beside mlx-lm's caches."""
    model, maker, is_compiled = small_llama(), maker_of(name), "compiled" in name
    with backend(name, maker):
        stock = step(model, filled(model, make_prompt_cache(model), batch, context), batch, maker)
        _, caches = paged(model, batch, context, compile=False)
        uncompiled = step(model, caches, batch, maker)
        sides = [stock, uncompiled]
        if is_compiled:
            factory, caches = paged(model, batch, context, compile=True)
            sides.append(step(model, caches, batch, maker))
        for side in sides:
            side()
        launches = maker.launches
        uncompiled()
        launches = maker.launches - launches
        gc.collect()
        turns = [[_last(side) for side in sides] for _ in range(TURNS)]
        if is_compiled:
            found = factory.recordings[factory.pool]
            # Python takes the first step: the pool does not know all layers before.
            assert (found.reason, found.repeated) == (None, TURNS * STEPS_OF_A_TURN)
        theirs, python, *_ = columns = [list(times) for times in zip(*turns, strict=True)]
        ours = columns[-1]
        costs = recording_costs(model, batch, context, median(python)) if is_compiled else {}
    return {
        "backend": name,
        "batch": batch,
        "context": context,
        "mlx_lm_microseconds": median(theirs) / LAYERS * 1e6,
        "paged_microseconds": median(ours) / LAYERS * 1e6,
        "paged_over_mlx_lm": ratio(ours, theirs),
        "spread_of_mlx_lm": spread(theirs),
        "launches_a_layer": launches / LAYERS,
        "decode_characters": _decode_characters(maker),
        **costs,
    }


def _last(side: Step) -> float:
    """The last of a turn's steps of one side."""
    return [side() for _ in range(STEPS_OF_A_TURN)][-1]


def maker_of(name: str) -> ArrayMaker:
    """What makes the kernels of a row."""
    if "compiled" in name:
        return GraphMaker()
    return RecordedMaker() if "recorded" in name else ArrayMaker()


def paged(
    model: Any, batch: int, context: int, *, compile: bool
) -> tuple[PagedCacheFactory, list[Any]]:
    """A factory, and caches of it that hold `context` tokens a row."""
    factory = PagedCacheFactory(model, max_bytes=1 << 30, compile=compile)
    return factory, filled(model, factory.make_cache(), batch, context)


def recording_costs(
    model: Any, batch: int, context: int, uncompiled_seconds: float
) -> dict[str, float]:
    """What the first recordings of several pools cost."""
    tokens = mx.ones((batch, 1), mx.int32)
    with _timed_recordings() as recording:
        for _ in range(RECORDINGS):
            _, caches = paged(model, batch, context, compile=True)
            for _ in range(2):
                model(tokens, cache=caches)
    assert len(recording) == RECORDINGS
    return {
        "uncompiled_microseconds": uncompiled_seconds / LAYERS * 1e6,
        "recording_steps": median(recording) / uncompiled_seconds,
    }


@contextmanager
def _timed_recordings() -> Iterator[list[float]]:
    """The seconds that each recording takes to make."""
    times: list[float] = []
    stock: Any = vars(recordings)["Recording"]

    def call(*arguments: Any) -> Any:
        began = time.thread_time()
        result = stock(*arguments)
        times.append(time.thread_time() - began)
        return result

    with patch.object(recordings, "Recording", call):
        yield times


def _decode_characters(maker: ArrayMaker) -> int:
    """Of the longest text that a decode step launches."""
    return max([size for name, size in maker.characters.items() if "decode" in name], default=0)


def main() -> None:
    rows = []
    for name in BACKENDS:
        for batch in BATCHES:
            for context in CONTEXTS:
                rows.append(measured(name, batch, context))
                print(rows[-1], flush=True)
    write_result("host_cost", {"layers": LAYERS, "rows": rows})


if __name__ == "__main__":
    main()
