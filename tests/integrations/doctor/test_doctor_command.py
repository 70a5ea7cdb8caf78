"""`paged-kv doctor`: what it says, and what it disables. Its checks have tests in
tests/kernels/gpu/test_backend.py."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from paged_kv.command_line import main
from paged_kv.integrations.doctor import examination, report
from paged_kv.kernels import backends
from paged_kv.kernels.backends import (
    Verdict,
    choose_backend,
    device_backend,
    record_verdict,
    variant,
    verdict_file,
    verdict_on,
)
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.kernels.self_test import Check


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PAGED_KV_BACKEND", raising=False)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """The checks of kernels: right ones, to which tests may add."""
    found = [Check("gather", f"q8 {each}", lambda: 0.0, 0.1) for each in ("float16", "bfloat16")]
    monkeypatch.setattr(examination, "checks", lambda backend: found)
    return found


def test_the_verdict_comes_first_then_what_is_wrong_and_a_line_for_each_operation(
    kernels: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.append(Check("decode in a window", "q4 bfloat16", lambda: 3.0, 0.1))
    assert main(["doctor"]) == 1
    parts = [part.splitlines() for part in capsys.readouterr().out.split("\n\n")]
    verdict, problems, system, operations = parts
    assert verdict[0] == "1 of 3 checks failed"
    assert verdict[1].startswith("the backend is disabled")
    assert verdict[-1].startswith("`paged-kv doctor --reset` undoes this.")
    assert [line.split("  ")[:2] for line in problems] == [
        ["FAIL", "decode in a window q4 bfloat16"]
    ]
    assert problems[0].endswith("off by 3.0e+00, at most 1e-01")
    assert system[0].startswith("backend: native")
    assert [line.rsplit("  ", 1)[1] for line in operations] == ["2 of 2 right", "0 of 1 right"]


@pytest.mark.usefixtures("kernels")
def test_all_of_it_is_printed_only_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    summary = capsys.readouterr().out
    assert summary.startswith("all checks passed\n")
    assert main(["doctor", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("backend: native")
    assert printed.endswith(summary[summary.rindex("\n\n") :])
    for line in ("pass  gather q8 float16 ", "pass  gather q8 bfloat16 "):
        assert line in printed
        assert line not in summary


def test_a_wrong_kernel_disables_a_backend_unless_it_is_named(
    kernels: list[Check], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    kernels.append(Check("copy", "q4 bfloat16", lambda: 3.0, 0.1))
    main(["doctor"])
    assert choose_backend().name == choose_backend().name == "plain"
    (warning,) = [each for each in caplog.messages if "disabled" in each]
    assert "native" in warning
    monkeypatch.setenv("PAGED_KV_BACKEND", "native")
    assert choose_backend().name == "native"
    monkeypatch.delenv("PAGED_KV_BACKEND")
    kernels.pop()
    main(["doctor"])
    assert choose_backend().name == "native"


def test_a_verdict_holds_for_its_device_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    name = variant(device_backend())
    record_verdict("metal", Verdict(disabled=True))
    record_verdict(name, Verdict(disabled=False))
    assert verdict_on(name) == Verdict(disabled=False)
    assert verdict_on("metal") == Verdict(disabled=True)
    assert verdict_on("cuda") is None
    for part in ("version", "device_name"):
        with monkeypatch.context() as here:
            here.setattr(backends, part, lambda *_: "another")
            assert verdict_on(name) is None
    for damaged in ("{", "[]", json.dumps({name: {"left out": 1}})):
        verdict_file().write_text(damaged)
        assert verdict_on(name) is None
    assert main(["doctor", "--reset"]) == 0
    assert not verdict_file().exists()


@pytest.mark.usefixtures("kernels")
def test_a_report_has_all_and_names_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paged_kv.integrations.bench.report import as_dict

    def measured(model: None, plan: Any) -> Any:
        warn_once(f"a warning about {Path.home()}/secret and {Path.cwd()}/here")
        return as_dict("stdlib-llama", "native", []), []

    monkeypatch.setattr(report, "measured", measured)
    file = tmp_path / "report.md"
    assert main(["doctor", "--report", str(file)]) == 0
    out = capsys.readouterr().out
    assert "backend: native" in out
    assert "pass  gather" not in out
    text = file.read_text()
    for expected in (
        *("## paged-kv doctor", "backend: native", "all checks passed", "stdlib-llama"),
        *("2 of 2 right", "pass  gather q8 bfloat16"),
        *("a warning about ~/secret and ./here", '"paged-kv"', '"memory_bytes"'),
    ):
        assert expected in text
    assert json.loads(text.split("```")[-2])["backend"] == "native"
    for personal in (str(Path.home()), socket.gethostname(), str(Path.cwd())):
        assert personal not in text
