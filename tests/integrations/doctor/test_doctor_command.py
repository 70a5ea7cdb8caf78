"""`paged-kv doctor`: what it says, and what it leaves out. Its checks have tests in
tests/kernels/gpu/test_backend.py."""

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.command_line import main
from paged_kv.integrations.doctor import compiled_steps, examination, kernel_times, report
from paged_kv.integrations.doctor.kernel_times import KernelTime, Size
from paged_kv.kernels import left_out as left_out_module
from paged_kv.kernels.backends import choose_backend, variant, whole_backend
from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.faster_steps import are_faster
from paged_kv.kernels.left_out import (
    COMPILED_STEPS,
    forget_left_out,
    leave_out,
    left_out,
    left_out_file,
)
from paged_kv.kernels.pages.attention import Attention
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import FP16
from paged_kv.kernels.partial_backend import READS, STEP_DECODE, PartialBackend
from paged_kv.kernels.plain.plain_recorder import PlainRecorder
from paged_kv.kernels.self_test import Check
from paged_kv.steps.recorded import NotRecordable, RecordedStep
from tests.support.arrays import normal
from tests.support.backends import native_library


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PAGED_KV_BACKEND", raising=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check and no time."""
    monkeypatch.setattr(examination, "checks", lambda backend: [])
    monkeypatch.setattr(examination, "kernel_times", lambda backend, without: [])


def slow(name: str) -> KernelTime:
    return KernelTime(name, 2.0, 1.0, 2.0, 1.9)


GATHER_CHECKS = [Check(f"gather q8 {dtype}", lambda: 0.0, 0.1) for dtype in ("float16", "bfloat16")]
GATHER_TIMES = [
    KernelTime("gather q4 float16", 1.0, 9.0, 0.1, 0.1),
    KernelTime("gather q8 float16", 1.0, 0.5, 2.0, 0.9),
]


def test_the_verdict_comes_first_then_what_is_wrong_and_a_line_for_each_operation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Check("decode in a window q4 bfloat16", lambda: 3.0, 0.1)
    times = [*GATHER_TIMES, slow("decode fp16 float16")]
    monkeypatch.setattr(examination, "checks", lambda backend: [*GATHER_CHECKS, wrong])
    monkeypatch.setattr(examination, "kernel_times", lambda backend, without: times)
    assert main(["doctor"]) == 1
    parts = [part.splitlines() for part in capsys.readouterr().out.split("\n\n")]
    verdict, problems, system, groups = parts
    assert verdict[:2] == [
        "1 of 3 checks failed",
        "slower than plain operations: decode fp16 float16",
    ]
    assert verdict[-1].startswith("`paged-kv doctor --reset` undoes this.")
    assert [line.split("  ")[:2] for line in problems] == [
        ["FAIL", "decode in a window q4 bfloat16"],
        ["SLOW", "decode fp16 float16"],
    ]
    assert problems[0].endswith("off by 3.0e+00, at most 1e-01")
    assert system[0].startswith("backend: native")
    assert system[-1].startswith("steps are not compiled: ")
    assert groups == [
        "gather              2 of 2 right  0.5 to 10 times as fast as plain operations",
        "decode in a window  0 of 1 right",
        "decode                            0.5 times as fast as plain operations",
    ]


@pytest.mark.usefixtures("quick")
def test_all_of_it_is_printed_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, "checks", lambda backend: GATHER_CHECKS)
    monkeypatch.setattr(examination, "kernel_times", lambda backend, without: GATHER_TIMES)
    assert main(["doctor"]) == 0
    summary = capsys.readouterr().out
    assert summary.startswith("all checks passed, and nothing is left out\n")
    assert main(["doctor", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("backend: native")
    assert printed.endswith(summary[summary.rindex("\n\n") :])
    for line in (
        "pass  gather q8 float16 ",
        "pass  gather q8 bfloat16 ",
        "time  gather q4 float16 ",
    ):
        assert line in printed
        assert line not in summary


def test_noise_is_not_slowness() -> None:
    assert slow("decode fp16 float16").is_slow
    assert not KernelTime("decode fp16 float16", 2.0, 1.0, 2.0, 0.9).is_slow
    assert not KernelTime("decode fp16 float16", 1.05, 1.0, 1.05, 1.04).is_slow


def test_a_time_is_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "ON_CPU", Size(1, 40, 4))
    monkeypatch.setattr(
        kernel_times, "in_turns", lambda *works, repetitions: [[3.0, 6.0, 8.0], [1.0, 2.0, 4.0]]
    )
    first = next(kernel_times.kernel_times(whole_backend()))
    assert (first.kernel_s, first.plain_s, first.ratio, first.least_ratio) == (6.0, 2.0, 3.0, 2.0)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain operations whose recorded steps pay, and few steps."""
    monkeypatch.setenv("PAGED_KV_BACKEND", "plain")
    monkeypatch.setattr(PlainRecorder, "pays", True)
    monkeypatch.setattr(compiled_steps, "STEPS", 10)
    monkeypatch.setattr(compiled_steps, "PROMPT_TOKENS", 252)
    monkeypatch.setattr(compiled_steps, "LAYERS", 1)
    monkeypatch.setattr(compiled_steps, "TIMED_STEPS", 1)


# On a machine that has not taken these steps before, MLX compiles them for twenty seconds.
@pytest.mark.slow
@pytest.mark.usefixtures("quick", "compiles")
def test_compiled_steps_are_compared_and_kept_where_they_are_right_and_quick(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_times, "LEAST_LOSS", 1e9)
    assert main(["doctor", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "pass  compiled steps " in out
    assert "time  compiled steps " in out
    assert "ms, steps that Python takes " in out
    assert not left_out("plain")


@pytest.mark.usefixtures("quick", "compiles")
def test_steps_are_compiled_where_they_were_found_right_and_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, wrong = (COMPILED_STEPS, lambda: 0.0, 0.1), (COMPILED_STEPS, lambda: 1.0, 0.1)
    for check, seconds, expected in (
        *((right, 0.5, True), (right, 1.05, False), (right, 0.5, True)),
        *((wrong, 0.5, False), (right, 0.5, True)),
    ):
        monkeypatch.setattr(compiled_steps, "check", partial(Check, *check))
        time = partial(KernelTime, COMPILED_STEPS, seconds, 1.0, seconds, seconds)
        monkeypatch.setattr(compiled_steps, "time", time)
        main(["doctor"])
        assert are_faster("plain") == expected
    assert main(["doctor", "--reset"]) == 0
    assert not are_faster("plain")


def _wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RecordedStep.offset_of
    monkeypatch.setattr(RecordedStep, "offset_of", lambda step, layer: right(step, layer) - 1)


def _nothing_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedStep, "changed", lambda step: [])
    monkeypatch.setattr(PlainRecorder, "changes", lambda self, tables: 0)
    monkeypatch.setattr(PlainRecorder, "keep", lambda self, *_: None)


def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(step: RecordedStep) -> list[mx.array]:
        raise NotRecordable("the compiler refuses it")

    monkeypatch.setattr(RecordedStep, "changed", changed)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_wrong_positions, "off by "),
        (_nothing_written, "off by "),
        (_refused, "RuntimeError: the compiler refuses it"),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("quick", "compiles")
def test_compiled_steps_that_are_wrong_are_left_out(
    fault: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault(monkeypatch)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  compiled steps " in out
    assert said in out
    assert "1 of 1 checks failed\nsteps are not compiled from now on" in out
    assert "stand in" not in out
    assert "slower than" not in out
    assert list(left_out("plain")) == [COMPILED_STEPS]


class Counted(NativeBackend):
    """Notes which reads its kernels serve."""

    def __init__(self) -> None:
        super().__init__(native_library())
        self.served: list[str] = []

    def attend(self, *arguments: Any, **options: Any) -> mx.array:
        self.served.append("attend")
        return super().attend(*arguments, **options)

    def write_and_attend(self, *arguments: Any, **options: Any) -> mx.array:
        self.served.append("write and attend")
        return super().write_and_attend(*arguments, **options)

    def attend_latent(self, *arguments: Any, **options: Any) -> mx.array:
        self.served.append("attend to latents")
        return super().attend_latent(*arguments, **options)

    def gather(self, *arguments: Any) -> tuple[mx.array, mx.array]:
        self.served.append("gather")
        return super().gather(*arguments)


def reads_of(backend: Backend) -> list[mx.array]:
    """The results of all reads, in the order of READS, of 300 tokens in 16 bits."""
    geometry = LayerGeometry(2, 64, mx.float16, 2, 64, mx.float16)
    pages = LayerPages(geometry, backend, 8)
    pages.map_slab(0, 8, FP16)
    metadata = AttentionMetadata(((3, 1),), (300,), (0,))
    shape = (1, 2, 300, 64)
    pages.write(normal(shape, mx.float16, 1), normal(shape, mx.float16, 2), metadata)
    one, many = normal((1, 4, 1, 64), mx.float16, 3), normal((1, 4, 9, 64), mx.float16, 4)
    results = [
        pages.attend(one, metadata, Attention(0.125, window=window)) for window in (None, 99)
    ]
    step = normal((1, 2, 1, 64), mx.float16, 5)
    pages.write_later(step, step, metadata)
    results += [pages.attend(one, metadata, Attention(0.125)), chosen_read(backend, one)]
    results += [pages.attend(many, metadata, Attention(0.125))]
    latent = LayerPages(LayerGeometry(1, 64, mx.float16, 1, 32, mx.float16), backend, 8)
    latent.map_slab(0, 8, FP16)
    latents, position_keys = (normal((1, 1, 300, dim), mx.float16, 6) for dim in (64, 32))
    latent.write(latents, position_keys, metadata)
    results += [pages.gather(metadata)[0]]
    return [*results, latent.attend_latent(one, one[..., :32], metadata, Attention(0.125))]


def chosen_read(backend: Backend, queries: mx.array) -> mx.array:
    """What a step reads of 900 tokens if it chooses 768."""
    geometry = LayerGeometry(2, 64, mx.float16, 2, 64, mx.float16, has_summaries=True)
    pages = LayerPages(geometry, backend, 8)
    pages.map_slab(0, 8, FP16)
    metadata, tokens = AttentionMetadata(((0, 1, 2, 3),), (900,), (0,)), (1, 2, 900, 64)
    pages.write(normal(tokens, mx.float16, 7), normal(tokens, mx.float16, 8), metadata)
    return pages.attend(queries, metadata, Attention(0.125, read_tokens=768))


@pytest.mark.parametrize("operation", READS)
def test_plain_operations_stand_in_for_a_read_and_no_other(operation: str) -> None:
    whole, counted = Counted(), Counted()
    expected = reads_of(whole)
    partial = PartialBackend(counted, [f"{operation} fp16 float16"])
    for found, right in zip(reads_of(partial), expected, strict=True):
        assert mx.allclose(found, right, atol=4e-3)
    if operation == STEP_DECODE:  # a write and another kernel
        assert (partial.fallbacks, counted.served.count("write and attend")) == (0, 0)
    else:
        assert partial.fallbacks == 1
        assert len(counted.served) == len(whole.served) - 1


@pytest.mark.parametrize(
    "kernel", ["decode q8 float16", "decode fp16 bfloat16", "decode in a window fp16 float16x"]
)
def test_kernels_of_other_pages_are_served(kernel: str) -> None:
    partial = PartialBackend(Counted(), [kernel])
    reads_of(partial)
    assert partial.fallbacks == 0


def test_a_wrong_write_leaves_all_kernels_out_except_of_a_backend_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_out(variant(whole_backend()), {COMPILED_STEPS: "off by 3"})
    assert choose_backend().name == "native"
    leave_out(variant(whole_backend()), {"copy q4 bfloat16": "off by 3"})
    assert choose_backend().name == "plain"
    monkeypatch.setenv("PAGED_KV_BACKEND", "native")
    assert choose_backend().name == "native"


def test_what_was_found_holds_for_its_device_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    name = variant(whole_backend())
    leave_out(name, {"copy q4 bfloat16": "off by 3"})
    leave_out("metal", {"gather q8 float16": "off by 4"})
    assert left_out(name) == {"copy q4 bfloat16": "off by 3"}
    assert left_out("metal") == {"gather q8 float16": "off by 4"}
    assert not left_out("cuda")
    for part in ("version", "device_name"):
        with monkeypatch.context() as here:
            here.setattr(left_out_module, part, lambda *_: "another")
            assert not left_out(name)
    leave_out(name, {})
    assert not left_out(name)
    assert left_out("metal")
    forget_left_out()
    assert not left_out_file().exists()


@pytest.mark.usefixtures("quick")
def test_a_report_has_all_and_names_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paged_kv.integrations.bench.report import as_dict
    from paged_kv.kernels.pages.warn_once import warn_once

    def measured(model: None, plan: Any) -> Any:
        warn_once(f"a warning about {Path.home()}/secret and {Path.cwd()}/here")
        return as_dict("stdlib-llama", "native", []), []

    monkeypatch.setattr(report, "measured", measured)
    monkeypatch.setattr(examination, "checks", lambda backend: GATHER_CHECKS)
    monkeypatch.setattr(examination, "kernel_times", lambda backend, without: GATHER_TIMES)
    file = tmp_path / "report.md"
    assert main(["doctor", "--report", str(file)]) == 0
    out = capsys.readouterr().out
    assert "backend: native" in out
    assert "pass  gather" not in out
    text = file.read_text()
    for expected in (
        *("## paged-kv doctor", "backend: native", "all checks passed", "stdlib-llama"),
        *(
            "gather              2 of 2 right",
            "pass  gather q8 bfloat16",
            "time  gather q4 float16",
        ),
        *("a warning about ~/secret and ./here", '"paged-kv"', '"memory_bytes"'),
    ):
        assert expected in text
    assert json.loads(text.split("```")[-2])["backend"] == "native"
    for personal in (str(Path.home()), socket.gethostname(), str(Path.cwd())):
        assert personal not in text
