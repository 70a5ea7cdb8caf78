"""`paged-kv doctor` names the active backend. Its checks have tests in test_gpu_backend.py."""

from collections.abc import Iterator

import pytest

from paged_kv.command_line import main
from paged_kv.kernels.cpu.native_library import load_native_library
from tests.backends import instruction_sets


@pytest.fixture(params=instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library, _ = load_native_library()
    assert library is not None
    before = library.instruction_set
    library.use_instruction_set(request.param)
    yield request.param
    library.use_instruction_set(before)


def test_it_names_the_instruction_set_in_use(
    instruction_set: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PAGED_KV_BACKEND", raising=False)
    monkeypatch.setattr("paged_kv.commands.doctor.checks", lambda backend: [])
    assert main(["doctor"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"backend: native ({instruction_set}), because MLX computes on a CPU")
