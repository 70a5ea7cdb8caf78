"""What a plan says is what a run takes, by MLX's own meters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.utils import save_config

from paged_kv import PagedCacheFactory
from paged_kv.integrations import paged_cache_factory, working_memory
from paged_kv.integrations.plan.memory_plan import MemoryPlan, Planner, Workload
from paged_kv.options import embedded_model
from tests.support.zoo import ZOO, small_model

WORKLOAD = Workload(context=1024, sessions=8, page_format="fp16", step=512)
KINDS = [
    "gemma3_text",
    *("qwen3_next", "llama", "qwen3_moe", "gemma2", "gpt_oss", "gemma3n", "deepseek_v3", "phi3"),
    *("cohere2", "stablelm", "plamo2", "mixtral", "mamba2", "falcon_h1", "glm4", "olmo2"),
    *("granite", "jamba", "lfm2"),
]
# How far MLX runs ahead of a CPU changes what a step of such small models takes, from machine to
# machine and from time to time. On a quiet one all were within a twentieth.
NEAR = 0.1


def taken(model: Any, plan: MemoryPlan) -> int:
    """The most bytes of MLX's meter, weights aside, while the sessions of a plan are made."""
    factory = PagedCacheFactory(
        model,
        max_bytes=plan.room + plan.slack,
        read_tokens=plan.workload.read_tokens,
    )
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before, held = mx.get_active_memory(), []
    for _ in range(plan.workload.sessions):
        held.append(factory.make_cache())
        left = plan.workload.context
        while left:
            step = min(plan.workload.step, left - 1) or 1
            model(mx.zeros((1, step), mx.int32), cache=held[-1])
            mx.eval([each.state for each in held[-1] if not each.empty()])
            mx.clear_cache()
            left -= step
    factory.close()
    return mx.get_peak_memory() - before


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure steps of few tokens only, which take as much of a small model for each token."""
    monkeypatch.setattr(working_memory, "MOST_TOKENS", working_memory.FEWEST_TOKENS)


def test_longer_steps_and_contexts_take_more_in_proportion() -> None:
    grows = working_memory.WorkingMemory(
        (working_memory.MeasuredStep(256, 100, 200), working_memory.MeasuredStep(512, 300, 310))
    )
    asked = [(100, 256), (256, 1024), (512, 4096), (2048, 4096)]
    found = [grows.bytes_for(*each) / working_memory.MARGIN for each in asked]
    assert found == pytest.approx([100, 400, 300, 1200], abs=1)


def embedded() -> Any:
    """The embedded model in numbers that a CPU computes quickly, not read yet."""
    model = load(embedded_model(), lazy=True)[0]
    model.set_dtype(mx.float32)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS[1:])]
)
def test_a_run_takes_what_the_plan_says(name: str) -> None:
    model: Any = small_model(name)
    mx.eval(model.parameters())
    plan = Planner([model], 1 << 30).plan(WORKLOAD)
    assert plan.fits
    assert plan.prompt_step + plan.all_sessions == pytest.approx(taken(model, plan), rel=NEAR)


@pytest.mark.slow
def test_weights_are_counted_before_they_are_read() -> None:
    plan = Planner([embedded()], 1 << 30).plan(replace(WORKLOAD, sessions=2))
    before = mx.get_active_memory()
    model = embedded()
    mx.eval(model.parameters())
    assert plan.weights == pytest.approx(mx.get_active_memory() - before, rel=0.02)
    whole = plan.weights + plan.prompt_step + plan.all_sessions
    assert whole == pytest.approx(plan.weights + taken(model, plan), rel=NEAR)


@pytest.mark.slow
def test_weights_of_most_layers_stay_on_disk(tmp_path: Path) -> None:
    config = ZOO["qwen3"] | {"num_hidden_layers": 12, "vocab_size": 128, "hidden_size": 256}
    model: Any = small_model("qwen3", **{key: config[key] for key in config if key != "model_type"})
    flat: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(flat), {"format": "mlx"})
    save_config(config | {"model_type": "qwen3"}, tmp_path / "config.json")
    del model, flat
    from mlx_lm.utils import load_model

    lazy = load_model(tmp_path, lazy=True)[0]
    mx.clear_cache()
    before = mx.get_active_memory()
    plan = Planner([lazy], 1 << 30).plan(WORKLOAD)
    assert mx.get_active_memory() - before < plan.weights / 2
    assert len(lazy.layers) == 12


@pytest.mark.slow
def test_a_step_ends_at_a_layer_that_takes_its_input_by_name() -> None:
    model: Any = small_model("gptj", n_layer=4)
    assert paged_cache_factory.measured_step(model).bytes_for(256, 256) > 0


@pytest.mark.soak
def test_changes_give_what_they_say() -> None:
    planner = Planner([embedded()], 160 << 20)
    plan = planner.plan(Workload(context=8192, sessions=4, page_format="fp16", step=2048))
    assert not plan.fits
    changes = dict(planner.changes(plan))
    assert changes["--page-format q4"].session < plan.session / 2.5
    assert changes["--prefill-step-size 256"].prompt_step < plan.prompt_step / 6
    assert changes[f"--sessions {plan.most_sessions}"].fits
    assert changes[f"--context {plan.longest}"].fits
    one_more = planner.plan(Workload(8192, plan.most_sessions + 1, "fp16", 2048))
    assert not one_more.fits


@pytest.mark.slow
def test_a_draft_model_is_part_of_the_plan() -> None:
    models: list[Any] = [small_model("qwen3", num_hidden_layers=1) for _ in range(2)]
    alone, both = (Planner(models[:count], 1 << 30).plan(WORKLOAD) for count in (1, 2))
    assert both.weights == 2 * alone.weights
    assert both.session == 2 * alone.session
    assert both.prompt_step == pytest.approx(alone.prompt_step, rel=0.1)


class TestAutomaticBudget:
    @pytest.fixture
    def memory(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Sets the memory of the machine, beside what MLX holds already."""

        def set_to(nbytes: int) -> int:
            mx.clear_cache()
            whole = nbytes + mx.get_active_memory()
            monkeypatch.setattr(working_memory, "device_bytes", lambda: whole)
            return whole

        return set_to

    @pytest.mark.slow
    def test_pages_and_steps_stay_within_the_machine(self, memory: Any) -> None:
        model = embedded()
        mx.eval(model.parameters())
        whole = memory(96 << 20)
        factory = PagedCacheFactory(model, max_bytes="auto")
        reserve = working_memory.reserve_of(whole)
        assert factory.pool.budget.max_bytes < whole - reserve
        step = factory.prompt_step
        assert step
        mx.reset_peak_memory()
        held = []
        while factory.can_admit(step):
            held.append(factory.make_cache())
            model(mx.zeros((1, step), mx.int32), cache=held[-1])
            mx.eval([each.state for each in held[-1]])
            mx.clear_cache()
        assert len(held) >= 4
        assert whole / 2 < mx.get_peak_memory() <= whole

    @pytest.mark.slow
    def test_prompt_steps_shrink_where_memory_is_short(self, memory: Any) -> None:
        model = embedded()
        steps: list[int] = []
        for megabytes in (400, 56, 8):
            memory(megabytes << 20)
            steps.append(PagedCacheFactory(model, max_bytes="auto").prompt_step or 0)
        assert steps == sorted(steps, reverse=True)
        assert steps[0] == 2048
        assert steps[-1] == 256
        assert 256 < steps[1] < 2048

    def test_a_line_says_what_goes_where_and_what_cannot_be_measured_leaves_a_fifth(
        self, memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model: Any = small_model("qwen3", num_hidden_layers=1)
        whole = memory(400 << 20)
        with caplog.at_level("INFO", "paged_kv"):
            factory = PagedCacheFactory(model, max_bytes="auto")
        (line,) = [each for each in caplog.messages if each.startswith("max_bytes is auto")]
        assert "a prompt step of 2,048 tokens" in line
        assert f"pages may take {factory.pool.budget.max_bytes / 1e6:.2f} MB" in line

        def failing(*_: Any) -> Any:
            raise ValueError("planned")

        monkeypatch.setattr(paged_cache_factory, "working_memory", failing)
        factory = PagedCacheFactory(model, max_bytes="auto")
        assert factory.pool.budget.max_bytes < 0.7 * whole
        assert "cannot be measured" in caplog.text


def test_no_format_is_proposed_that_cannot_hold_the_heads() -> None:
    planner = Planner([small_model("llama", head_dim=40)], 200 << 20)
    plan = planner.plan(replace(WORKLOAD, context=8192, sessions=400))
    assert not plan.fits
    proposed = {name.split()[0] for name, _ in planner.changes(plan)}
    assert proposed
    assert "--page-format" not in proposed
