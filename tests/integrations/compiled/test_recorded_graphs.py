"""A recorded step launches what a step launches that Python takes, in that order, and whatever
changes from step to step is an argument of its launches."""

from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from benches.host_cost import GraphMaker, backend, small_llama
from benches.models import filled
from paged_kv import PagedCacheFactory
from paged_kv.integrations.compiled import recordings
from paged_kv.integrations.compiled.recording import Repeated, StepFunction
from paged_kv.integrations.compiled.recordings import Comparisons
from paged_kv.kernels import backends
from paged_kv.kernels.pages import tables as tables_module
from paged_kv.kernels.pages.layer_memory import MAX_SLABS
from paged_kv.steps.recorded import NotRecordable, RecordableStep
from tests.support.gpu_on_cpu.launch_order import unordered
from tests.support.gpu_pages import backend_on, device_of, needs_compiler
from tests.support.zoo import small_model

LAYERS = 3


class Launch(NamedTuple):
    """The names of a launch's inputs in the graph, and of the token that it gives."""

    queries: str
    keys: str
    slabs: list[str]
    others: list[str]
    """Layouts, tables, parameters, and the token of the launch before."""
    done: str


def recorded_step(batch: int) -> tuple[dict[str, list[str]], dict[str, list[str]], list[Launch]]:
    """The names of a step's inputs, outputs and constants, what each array is made of, and the
    launches. Kernels are operations that tell their inputs and outputs."""
    found: list[dict[str, Any]] = []

    def export(step: StepFunction, tokens: mx.array, *_: Any) -> None:
        mx.export_function(found.append, step, tokens, *step.step.arrays())
        raise NotRecordable("it was exported")

    model = small_llama(layers=LAYERS)
    with pytest.MonkeyPatch.context() as patch, backend("metal", GraphMaker()):
        patch.setattr(recordings, "Recording", export)
        factory = PagedCacheFactory(model, compile=True, max_bytes=1 << 30)
        caches = filled(model, factory.make_cache(), batch, 300)
        for _ in range(2):
            model(mx.ones((batch, 1), mx.int32), cache=caches)
    of_kind = {
        each["type"]: [entry[0] for entry in each[each["type"]]]
        for each in found
        if each["type"] in ("inputs", "outputs", "constants")
    }
    sources: dict[str, list[str]] = {}
    launches = []
    for each in found:
        if each["type"] == "primitive":
            given, outputs = ([entry[0] for entry in each[way]] for way in ("inputs", "outputs"))
            sources |= dict.fromkeys(outputs, given)
            if each["name"] == "Depends":
                *step, layouts, tables, params, before = given[len(outputs) :]
                others = [layouts, tables, params, before]
                launches.append(Launch(step[0], step[1], step[-MAX_SLABS:], others, outputs[-1]))
    return of_kind, sources, launches


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_what_changes_from_step_to_step_is_an_argument(batch: int) -> None:
    of_kind, sources, launches = recorded_step(batch)
    tokens, positions, tables, *of_layers = of_kind["inputs"]
    logits, *changed = of_kind["outputs"]

    def reaches(name: str, source: str) -> bool:
        found, waiting = set(), [name]
        while waiting and source not in found:
            if (each := waiting.pop()) not in found:
                found.add(each)
                waiting += sources.get(each, [])
        return source in found

    assert reaches(logits, tokens)
    assert len(launches) == LAYERS
    for at, launch in enumerate(launches):
        count = len(of_layers) // LAYERS
        *slabs, layouts, before = of_layers[at * count : (at + 1) * count]
        assert reaches(launch.queries, positions)
        assert reaches(launch.keys, positions)
        assert set(launch.slabs) == set(slabs)
        assert launch.others[:2] == [layouts, tables]
        assert launch.others[2] in of_kind["constants"]
        assert (launch.others[3], launch.done) == (before, changed[at])


class StepByStep:
    """In the place of a `Recording`: runs what would be recorded on the step's own arrays."""

    def __init__(self, first: StepFunction, *_: Any) -> None:
        self._call = first.call

    def __call__(self, tokens: mx.array, caches: list[Any], step: RecordableStep) -> Repeated:
        function = StepFunction(self._call, caches, step)
        logits, *changed = function(tokens, *step.arrays())
        return Repeated(logits, [], changed, [], function.written)


def _llama() -> Any:
    """Of heads that kernels take."""
    model: Any = small_model(
        "qwen3", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    model.set_dtype(mx.float16)
    return model


def _run(
    dialect: str,
    *,
    compile: bool,
    page_format: str = "fp16",
    forks: int = 1,
    read_tokens: int | None = None,
) -> tuple[list[list[int]], list[str], list[str]]:
    """The tokens, the launches and those without order of a run over the end of a page, by a
    sequence or by so many that share two pages."""
    device, model = device_of(dialect), _llama()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_best", lambda: backend_on(device, dialect))
        patch.setattr(recordings, "Recording", StepByStep)
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
@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "page_format"), [("metal", "fp16"), ("cuda", "q8")])
def test_kernels_run_as_in_steps_that_python_takes(dialect: str, page_format: str) -> None:
    """Same tokens by the same launches, in the recorded order, which misses nothing."""
    expected = _run(dialect, compile=False, page_format=page_format)
    assert _run(dialect, compile=True, page_format=page_format) == expected
    _, _, faults = expected
    assert faults == []


@needs_compiler
@pytest.mark.soak
def test_groups_that_read_shared_pages_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, names, _ = _run("metal", compile=False, forks=3)
    assert not any("in_groups" in name for name in names)
    monkeypatch.setattr(tables_module, "LEAST_SAVED", 1)
    found, names, faults = _run("metal", compile=True, forks=3)
    assert found == expected
    assert sum("in_groups" in name for name in names) == 8 * 2
    assert faults == []
    assert _run("metal", compile=False, forks=3)[:2] == (found, names)
