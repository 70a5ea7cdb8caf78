"""A recorded step launches what a step launches that Python takes, in that order, and whatever
changes from step to step is an argument of its launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from benches.host_cost import GraphMaker, backend, filled, small_llama
from paged_kv import PagedCacheFactory
from paged_kv.integrations.compiled import recordings
from paged_kv.integrations.compiled.recording import Repeated, StepFunction
from paged_kv.integrations.compiled.recordings import Comparisons
from paged_kv.kernels import backends
from paged_kv.kernels.gpu.arrays import BoundSlabs, bound_slabs
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.gpu.kernels import LEAST_ELEMENTS
from paged_kv.kernels.pages import prefix_groups
from paged_kv.kernels.pages.layer_memory import MAX_SLABS
from paged_kv.kernels.pages.tables import Tables
from paged_kv.steps.recorded import RecordableStep, RecordedStep
from tests.support.gpu_on_cpu.launch_order import unordered
from tests.support.gpu_pages import backend_on, device_of, needs_compiler, new_pages, same
from tests.support.zoo import small_model

LAYERS = 3
Plant = Callable[[pytest.MonkeyPatch], None]


class Launch(NamedTuple):
    """The names of a launch's inputs in the graph, and of the token that it gives."""

    queries_keys_values: list[str]
    slabs: list[str]
    layouts: str
    tables: str
    params: str
    before: str
    done: str


class Graph(NamedTuple):
    """The names of a recorded step's inputs, outputs and constants, and what depends on what."""

    inputs: list[str]
    outputs: list[str]
    constants: set[str]
    sources: dict[str, list[str]]
    launches: list[Launch]

    def reaches(self, name: str, source: str) -> bool:
        """Whether an array depends on another."""
        found, waiting = set(), [name]
        while waiting:
            each = waiting.pop()
            if each == source:
                return True
            if each not in found:
                found.add(each)
                waiting += self.sources.get(each, [])
        return False


def graph_of_a_step(batch: int) -> Graph:
    """The graph of a step of a llama; kernels are operations that tell their inputs and outputs."""
    found: list[dict[str, Any]] = []

    def export(call: Any, tokens: mx.array, caches: list[Any], step: RecordableStep) -> None:
        function = StepFunction(call, caches, step)
        mx.export_function(found.append, function, tokens, *step.arrays())

    model = small_llama(layers=LAYERS)
    with pytest.MonkeyPatch.context() as patch, backend("metal", GraphMaker()):
        patch.setattr(recordings, "require_no_numbers", export)
        factory = PagedCacheFactory(model, compile=True, max_bytes=1 << 30)
        caches = filled(factory.make_cache(), batch, 300)
        for _ in range(2):
            model(mx.ones((batch, 1), mx.int32), cache=caches)
    by_kind = {each["type"]: each for each in found if each["type"] != "primitive"}
    operations = [each for each in found if each["type"] == "primitive"]
    names = {
        kind: [each[0] for each in by_kind[kind][kind]]
        for kind in ("inputs", "outputs", "constants")
    }
    sources = {
        output[0]: [each[0] for each in operation["inputs"]]
        for operation in operations
        for output in operation["outputs"]
    }
    launches = [_launch(each) for each in operations if each["name"] == "Depends"]
    return Graph(names["inputs"], names["outputs"], set(names["constants"]), sources, launches)


def _launch(operation: dict[str, Any]) -> Launch:
    outputs = [each[0] for each in operation["outputs"]]
    given = [each[0] for each in operation["inputs"]][len(outputs) :]
    *step, layouts, tables, params, before = given
    return Launch(
        step[:-MAX_SLABS], step[-MAX_SLABS:], layouts, tables, params, before, outputs[-1]
    )


def faults_of(graph: Graph) -> list[str]:
    """What would be wrong in the next step."""
    tokens, positions, tables, *of_layers = graph.inputs
    logits, *changed = graph.outputs
    faults = []
    if not graph.reaches(logits, tokens):
        faults.append("tokens are constants")
    for at, launch in enumerate(graph.launches):
        own = of_layers[at * len(of_layers) // LAYERS : (at + 1) * len(of_layers) // LAYERS]
        *slabs, layouts, before = own
        queries, keys, _ = launch.queries_keys_values
        if not graph.reaches(queries, positions) or not graph.reaches(keys, positions):
            faults.append(f"positions are constants in layer {at}")
        if launch.tables != tables:
            faults.append(f"tables are others in layer {at}")
        if set(launch.slabs) != set(slabs) or launch.layouts != layouts:
            faults.append(f"slabs are others in layer {at}")
        if launch.before != before or changed[at] != launch.done:
            faults.append(f"order tokens are others in layer {at}")
        if launch.params not in graph.constants:
            faults.append(f"parameters are no constants in layer {at}")
    return faults


@pytest.mark.parametrize("batch", [1, 8])
def test_what_changes_from_step_to_step_is_an_argument(batch: int) -> None:
    graph = graph_of_a_step(batch)
    assert len(graph.launches) == LAYERS
    assert faults_of(graph) == []


def _bake_positions(patch: pytest.MonkeyPatch) -> None:
    init = RecordedStep.__init__

    def baked(self: Any, recordable: Any, arrays: Any, before: int | None) -> None:
        init(self, recordable, arrays, before)
        self._offset = mx.array([row.offset for row in recordable.step.rows], mx.int32)

    patch.setattr(RecordedStep, "__init__", baked)


def _swap_order_tokens(patch: pytest.MonkeyPatch) -> None:
    changed = RecordedStep.changed
    patch.setattr(RecordedStep, "changed", lambda self: changed(self)[::-1])


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (_bake_positions, "positions are constants in layer 0"),
        (_swap_order_tokens, "order tokens are others in layer 0"),
    ],
)
def test_planted_faults_are_noticed(
    plant: Plant, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert found in faults_of(graph_of_a_step(1))


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (Tables, "standing_for", lambda tables, arrays: (next(arrays), tables)[1]),
        (BoundSlabs, "standing_for", lambda bound, handles: bound),
    ],
    ids=["tables", "slabs"],
)
def test_what_is_not_used_as_an_argument_is_refused(
    owner: Any, name: str, planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX records no function that leaves out one of its arguments."""
    monkeypatch.setattr(owner, name, planted)
    model = small_llama(layers=LAYERS)
    with backend("metal", GraphMaker()):
        factory = PagedCacheFactory(model, compile=True, max_bytes=1 << 30)
        caches = filled(factory.make_cache(), 1, 300)
        for _ in range(2):
            model(mx.ones((1, 1), mx.int32), cache=caches)
    assert "uncaptured inputs" in str(factory.recordings[factory.pool].reason)


class StepByStep:
    """In the place of a `Recording`: runs what would be recorded on the step's own arrays."""

    def __init__(self, call: Any, *_: Any) -> None:
        self._call = call

    def __call__(self, tokens: mx.array, caches: list[Any], step: RecordableStep) -> Repeated:
        function = StepFunction(self._call, caches, step)
        logits, *changed = function(tokens, *step.arrays())
        return Repeated(logits, [], changed, [], function.written)


def _llama() -> Any:
    mx.random.seed(3)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        rms_norm_eps=1e-6,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    model = llama.Model(args)
    model.set_dtype(mx.float16)
    return model


def _deepseek() -> Any:
    """Layers of latents of a size that kernels take."""
    sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 64}
    # Without experts, which MLX has in float32 only on a CPU.
    model = small_model("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2, **sizes)
    model.set_dtype(mx.float16)
    return model


def _run(
    dialect: str,
    *,
    compile: bool,
    page_format: str = "fp16",
    forks: int = 1,
    model_of: Callable[[], Any] = _llama,
    read_tokens: int | None = None,
) -> tuple[list[list[int]], list[str], list[str]]:
    """The tokens, the launches and those without order of a run over the end of a page, by a
    sequence or by so many that share two pages."""
    device, model = device_of(dialect), model_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_best", lambda: backend_on(device, dialect))
        patch.setattr(recordings, "Recording", StepByStep)
        patch.setattr(recordings, "require_no_numbers", lambda *_: None)
        patch.setattr(Comparisons, "is_due", lambda self, is_first: False)
        factory = PagedCacheFactory(
            model,
            compile=compile,
            page_format=page_format,
            max_bytes=64 << 20,
            read_tokens=read_tokens,
        )
        caches: list[Any] = factory.make_cache()
        pages = 4 if read_tokens else 3 if forks > 1 else 1
        prompt = mx.array([[(7 * i) % 64 for i in range(256 * pages - 3)]])
        token = mx.argmax(model(prompt, cache=caches)[:, -1:], axis=-1)
        if forks > 1:
            caches = [cache.merge([cache] * forks) for cache in caches]
            token = mx.arange(forks)[:, None]
        tokens: list[Any] = []
        for _ in range(8):
            token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
            tokens.append(token[:, 0].tolist())
        if compile:
            assert factory.recordings[factory.pool].repeated >= 6
    names = [each.name for each in device.launches]
    return tokens, names, unordered(device.launches)


@needs_compiler
@pytest.mark.parametrize("dialect", ["metal", pytest.param("cuda", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page_format", ["fp16", "q8"])
def test_kernels_run_as_in_steps_that_python_takes(dialect: str, page_format: str) -> None:
    """Same tokens by the same launches, in the recorded order, which misses nothing."""
    expected = _run(dialect, compile=False, page_format=page_format)
    assert _run(dialect, compile=True, page_format=page_format) == expected
    _, _, faults = expected
    assert faults == []


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("model_of", [_llama, _deepseek])
def test_groups_that_read_shared_pages_are_recorded(
    model_of: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, names, _ = _run("metal", compile=False, forks=3, model_of=model_of)
    assert not any("in_groups" in name for name in names)
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)
    found, names, faults = _run("metal", compile=True, forks=3, model_of=model_of)
    assert found == expected
    assert sum("in_groups" in name for name in names) == 8 * 2
    assert faults == []
    assert _run("metal", compile=False, forks=3, model_of=model_of)[:2] == (found, names)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "read_tokens"), [("metal", 768), ("cuda", 768), ("metal", 1026)]
)
def test_choices_are_recorded(dialect: str, read_tokens: int) -> None:
    """The page that a step fills is summarised behind all of its layers, and chosen of then. Of
    1,026 tokens, steps choose from the sixth on."""
    expected, launches, _ = _run(dialect, compile=False, read_tokens=read_tokens)
    found, names, faults = _run(dialect, compile=True, read_tokens=read_tokens)
    assert found == expected
    assert sorted(names) == sorted(launches)
    assert faults == []
    scored = [name for name in names if "_score_" in name]
    assert len(scored) == (8 if read_tokens == 768 else 3) * 2
    assert sum("_summarise_" in name for name in names) == 2 * 2


def test_handles_have_the_addresses_of_slabs() -> None:
    """Kernels take no more of a slab, and its shape is none of a recording's."""
    pages = new_pages(GpuBackend("metal", GraphMaker()), same(64), ["fp16", "q8", "q4"])
    bound = bound_slabs(pages, (0, 1, 2))
    *handles, layouts = bound.handles
    assert bound.inputs == (*handles[:3], *handles[:1] * 13, layouts)
    addresses = [np.asarray(each).ctypes.data for each in handles]
    slabs = [np.asarray(pages.slabs[slab].memory).ctypes.data for slab in (0, 1, 2)]
    assert addresses == [*slabs, slabs[0]]
    assert {each.shape for each in handles} == {(LEAST_ELEMENTS,)}


@needs_compiler
def test_a_token_that_is_given_to_another_layer_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _swap_order_tokens(monkeypatch)
    _, _, faults = _run("metal", compile=True, page_format="fp16")
    assert faults
