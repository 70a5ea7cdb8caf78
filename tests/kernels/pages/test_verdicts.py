"""Kernels are checked before their first use, once for all processes, whatever a check does."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

from benches.host_cost import GraphMaker
from paged_kv.kernels.backends import backend_for, choose_backend
from paged_kv.kernels.cpu.native_backend import NativeBackend
from paged_kv.kernels.cpu.native_library import LIBRARY, NativeLibrary
from paged_kv.kernels.gpu import backend as gpu_backend
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.pages import verdicts as verdicts_module
from paged_kv.kernels.pages.attention_metadata import AttentionMetadata
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.page_format import LayerGeometry
from paged_kv.kernels.pages.self_test import Check
from paged_kv.kernels.pages.verdicts import (
    NEVER_ENDED,
    RIGHT,
    Verdicts,
    WrongKernel,
    digest_of,
    forget_verdicts,
    verdict_file,
    verdicts_on,
)
from tests.support.gpu_pages import new_pages, same

METADATA = AttentionMetadata(((0,),), (20,), (0,))
STEP = mx.zeros((1, 2, 20, 64), mx.float16), mx.zeros((1, 2, 20, 64), mx.float16)
CHECKING = """
import sys
from pathlib import Path
from paged_kv.kernels.pages.verdicts import Verdicts

def check():
    print("checking", flush=True)
    return sys.stdin.readline().strip() or None

Verdicts(Path(sys.argv[1]), "gpu").require(["decode"], check)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    warn_once.cache_clear()
    return tmp_path / "paged-kv" / "kernels.json"


@pytest.fixture
def checking(file: Path) -> Iterator[Any]:
    """Another process, in the middle of a check."""
    command = [sys.executable, "-c", CHECKING, str(file)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "checking\n"
        yield process
        process.kill()


def never() -> str | None:
    raise AssertionError("checked twice")


def test_a_kernel_is_checked_once_for_all_processes(file: Path) -> None:
    checked: list[str] = []
    for name in ("decode", "write", "decode"):
        Verdicts(file, "gpu").require([name], lambda name=name: checked.append(name))  # type: ignore[misc]
    assert checked == ["decode", "write"]
    Verdicts(file, "gpu, a later version").require(["decode"], lambda: checked.append("again"))
    assert checked[2:] == ["again"]
    assert Verdicts(file, "gpu").found == {"decode": RIGHT, "write": RIGHT}


def test_one_wrong_kernel_ends_all_of_its_backend(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = Verdicts(file, "gpu")
    here.require(["write"], lambda: None)
    for verdicts in (here, here, Verdicts(file, "gpu")):
        with pytest.raises(WrongKernel, match="decode: off by 3"):
            verdicts.require(["decode"], lambda: "off by 3")
        with pytest.raises(WrongKernel):
            verdicts.require(["write"], never)
    (line,) = caplog.messages
    assert "paged-kv doctor --report" in line
    assert Verdicts(file, "cpu").failure is None


def test_a_check_that_does_not_end_costs_one_start(file: Path, checking: Any) -> None:
    """Killed from outside, as when the device hangs, or by the kernel itself: it makes no
    difference. While the other process lives, it may still find that the kernel is right."""
    assert Verdicts(file, "gpu").failure is None
    checking.kill()
    checking.wait()
    for _ in range(2):
        later = Verdicts(file, "gpu")
        assert later.failure == f"decode: {NEVER_ENDED}"
        with pytest.raises(WrongKernel):
            later.require(["decode"], never)


@pytest.mark.parametrize("found", ["", "off by 3"])
def test_one_of_two_processes_checks(file: Path, checking: Any, found: str) -> None:
    verdicts = Verdicts(file, "gpu")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(verdicts.require, ["decode"], never)
        checking.communicate(f"{found}\n")
        assert isinstance(waiting.exception(), WrongKernel) == bool(found)


def test_nobody_waits_for_ever(file: Path, checking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts_module, "PATIENCE", 0.0)
    with pytest.raises(WrongKernel, match="another process"):
        Verdicts(file, "gpu").require(["decode"], never)
    checking.communicate("\n")
    assert Verdicts(file, "gpu").found == {"decode": RIGHT}


def test_an_interrupted_check_says_nothing(file: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Verdicts(file, "gpu").require(["decode"], interrupted)
    assert Verdicts(file, "gpu").found == {}


def test_without_a_file_verdicts_hold_in_the_process(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.write_text("no folder")
    verdicts = Verdicts(file, "gpu")
    for name in ("decode", "write"):
        verdicts.require([name], lambda: None)
        verdicts.require([name], never)
    assert len([line for line in caplog.messages if "cannot be written" in line]) == 1
    with pytest.raises(WrongKernel):
        verdicts.require(["copy"], lambda: "off by 3")


@pytest.mark.parametrize("damaged", ["{", "[]", '{"gpu": 3}'])
def test_a_damaged_file_is_replaced(file: Path, damaged: str) -> None:
    file.parent.mkdir()
    file.write_text(damaged)
    Verdicts(file, "gpu").require(["decode"], lambda: None)
    assert Verdicts(file, "gpu").found == {"decode": RIGHT}


def test_verdicts_are_of_a_device_of_kernels_and_of_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert verdicts_on("metal", "1") is verdicts_on("metal", "1")
    for other in (("metal", "2"), ("cuda", "1")):
        assert verdicts_on(*other).backend != verdicts_on("metal", "1").backend
    for part in ("version", "device_name"):
        with monkeypatch.context() as here:
            here.setattr(verdicts_module, part, lambda *_: "another")
            assert "another" in verdicts_on("metal", "1").backend


def test_changed_kernels_are_other_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pull may change them and leave the version."""
    monkeypatch.setattr(gpu_backend, "KERNELS", tmp_path)
    builds = set()
    for folder in ("gpu", "metal", "cuda"):
        (tmp_path / folder / "__pycache__").mkdir(parents=True)
    for name in ("gpu/decode.h", "metal/decode.metal", "metal/new.h"):
        (tmp_path / name).write_text("float x;")
        digest_of.cache_clear()
        builds.add(GpuBackend("metal", GraphMaker()).build)
    library = tmp_path / LIBRARY.name
    library.write_bytes(LIBRARY.read_bytes())
    native = NativeBackend(NativeLibrary(library))
    builds |= {native.build, NativeBackend(NativeLibrary(LIBRARY)).build}
    assert len(builds) == 4
    with library.open("ab") as end:
        end.write(b"!")
    digest_of.cache_clear()
    assert native.build not in builds


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError("[malloc] Unable to allocate 4096 bytes."), MemoryError),
    ],
)
def test_what_ends_a_check_early_says_nothing_of_kernels(
    error: BaseException, raised: type[BaseException], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels, whose checks do not run this one, may be needed before it is checked again."""
    backend = GpuBackend("metal", GraphMaker())
    verdicts = backend.verdicts = Verdicts(file, "gpu")
    pages = new_pages(backend, same(64), ["fp16"])
    with monkeypatch.context() as patch:
        patch.setattr(LayerPages, "write", Mock(side_effect=error))
        with pytest.raises(raised):
            backend.write(pages, *STEP, METADATA)
    assert verdicts.found == {}
    monkeypatch.setattr(Check, "result", lambda check: (check.run() >= 0, ""))  # right
    backend.gather(pages, METADATA, None)
    backend.write(pages, *STEP, METADATA)
    assert len(verdicts.found) == 2
    assert verdicts.failure is None


@pytest.mark.usefixtures("checks_kernels")
def test_a_cpu_kernel_that_is_wrong_serves_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = LayerGeometry(2, 64, mx.float16, 2, 64, mx.float16)
    assert backend_for(choose_backend(), geometry).name == "native"
    forget_verdicts()
    monkeypatch.setattr(NativeBackend, "attend", lambda self, pages, queries, *_, **__: 0 * queries)
    assert backend_for(choose_backend(), geometry).name == "plain"
    assert choose_backend().name == "plain"


@pytest.mark.usefixtures("checks_kernels")
def test_who_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choose_backend().verdicts is not None
    assert verdict_file() == tmp_path / "paged-kv" / "kernels.json"
    monkeypatch.setenv("PAGED_KV_CERTIFY", "0")
    assert choose_backend().verdicts is None
    monkeypatch.setenv("PAGED_KV_CERTIFY", "no")
    with pytest.raises(ValueError, match="PAGED_KV_CERTIFY"):
        choose_backend()
    monkeypatch.delenv("PAGED_KV_CERTIFY")
    monkeypatch.setenv("PAGED_KV_BACKEND", "native")
    assert choose_backend().verdicts is None
