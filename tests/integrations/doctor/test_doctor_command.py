"""`paged-kv doctor`: what it says, and what it disables. Its checks have tests in
tests/kernels/gpu/test_backend.py."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from paged_kv.command_line import main
from paged_kv.integrations.bench import bench_command
from paged_kv.integrations.doctor import examination
from paged_kv.kernels.backends import choose_backend, device_backend
from paged_kv.kernels.pages import verdicts as verdicts_module
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.kernels.pages.self_test import Check
from paged_kv.kernels.pages.verdicts import TRYING, verdict_file, verdicts_on, write_found

pytestmark = pytest.mark.usefixtures("checks_kernels")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """The checks of kernels: right ones, to which tests may add."""
    found = [Check(lambda: 0.0, 0.1, f"gather q8 {each}") for each in ("float16", "bfloat16")]
    monkeypatch.setattr(examination, "checks", lambda backend: found)
    return found


def test_what_it_found_holds_and_is_told(
    kernels: list[Check], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("no kernel was checked")
    kernels.append(Check(lambda: 3.0, 0.1, "copy q4 bfloat16"))
    assert main(["doctor", "--again"]) == 1
    assert capsys.readouterr().out.startswith("right  gather q8 float16 ")
    assert choose_backend().name == choose_backend().name == "plain"
    assert main(["doctor", "--verbose"]) == 1
    parts = [part.splitlines() for part in capsys.readouterr().out.split("\n\n")]
    verdict, wrong, system, right = parts
    assert verdict[0].startswith("2 of 3 checks")
    assert wrong == ["WRONG  copy q4 bfloat16: off by 3.0e+00, at most 1e-01"]
    assert system[0].startswith("backend: native")
    assert right == ["right  gather q8 float16", "right  gather q8 bfloat16"]
    assert main(["doctor"]) == 1
    assert "right  " not in capsys.readouterr().out
    monkeypatch.setenv("PAGED_KV_BACKEND", "native")
    assert choose_backend().name == "native"
    monkeypatch.delenv("PAGED_KV_BACKEND")
    for undo in ("--again", "--reset"):
        kernels[2:] = [Check(lambda: 3.0, 0.1, "copy q4 bfloat16")]
        main(["doctor", "--again"])
        kernels.pop()
        assert main(["doctor", undo]) == 0
        assert choose_backend().name == "native"


def test_what_another_process_is_checking_is_not_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    backend, file = device_backend(), verdict_file()
    found = verdicts_on(backend.variant, backend.build)
    write_found(file, found.backend, {"decode": TRYING})
    with FileLock(file.with_suffix(".lock")):
        verdicts_module._verdicts.cache_clear()
        assert main(["doctor"]) == 0
    assert "WRONG" not in capsys.readouterr().out
    verdicts_module._verdicts.cache_clear()
    assert main(["doctor"]) == 1


@pytest.mark.usefixtures("kernels")
def test_a_report_has_all_and_names_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paged_kv.integrations.bench.report import as_dict

    def measured(model: None, plan: Any) -> Any:
        warn_once(f"a warning about {Path.home()}/secret and {Path.cwd()}/here")
        return as_dict("stdlib-llama", "native", []), []

    monkeypatch.setattr(bench_command, "measured", measured)
    file = tmp_path / "report.md"
    assert main(["doctor", "--report", str(file)]) == 0
    out = capsys.readouterr().out
    assert "backend: native" in out
    text = file.read_text()
    for expected in (
        *("## paged-kv doctor", "backend: native", "stdlib-llama"),
        *("2 of 2 checks", "right  gather q8 bfloat16"),
        *("a warning about ~/secret and ./here", '"paged-kv"', '"memory_bytes"'),
    ):
        assert expected in text
    assert json.loads(text.split("```")[-2])["backend"] == "native"
    for personal in (str(Path.home()), socket.gethostname(), str(Path.cwd())):
        assert personal not in text
