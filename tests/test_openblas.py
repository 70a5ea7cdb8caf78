"""OpenBLAS serves MLX where it is installed, and nothing fails where it is not."""

import subprocess
import sys

import pytest

from benches.openblas import LIBRARY
from paged_kv import openblas
from paged_kv.integrations.doctor import blas

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")
# As in a process of a user: nothing has loaded OpenBLAS, except what the script calls.
SCRIPT = """
import sys
from paged_kv import openblas
exec(sys.argv[1])
from paged_kv.integrations.doctor.blas import blas_line
print(blas_line())
"""


CODES = "pass", "openblas.load_openblas()"


def line_after(code: str) -> str:
    """What the doctor says of the BLAS in a new process that runs this first."""
    command = [sys.executable, "-c", SCRIPT, code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@linux_only
def test_without_openblas_the_doctor_names_what_serves_and_what_to_install() -> None:
    line = line_after("pass")
    assert "GFLOP/s in float32; OpenBLAS is many times as fast" in line
    assert "BLAS of MLX: OpenBLAS" not in line
    assert "apt install libopenblas0-pthread, dnf install openblas, or pacman -S openblas" in line


@linux_only
@pytest.mark.skipif(LIBRARY is None, reason="OpenBLAS is not installed")
def test_a_command_loads_it_before_mlx_computes() -> None:
    line = line_after(
        "from paged_kv.command_line import main; main(['stats', '--pid', '99999999'])"
    )
    assert line.startswith("BLAS of MLX: OpenBLAS 0.")
    assert f"{LIBRARY}, " in line


@linux_only
def test_where_it_is_not_installed_nothing_is_loaded_and_nothing_fails() -> None:
    line = line_after(
        "openblas._NAMES = ('libnothing.so',); assert openblas.load_openblas() is None"
    )
    assert "; OpenBLAS is many times as fast" in line


@linux_only
@pytest.mark.skipif(LIBRARY is None, reason="OpenBLAS is not installed")
def test_it_is_several_times_as_fast() -> None:
    """So it serves, and is not just there."""
    speeds = [float(line_after(code).split(" GFLOP/s")[0].split()[-1]) for code in CODES]
    assert speeds[1] > 3 * speeds[0]


def test_a_program_that_loads_it_after_mlx_is_told() -> None:
    with pytest.raises(RuntimeError, match="call load_openblas before the first import of mlx"):
        openblas.load_openblas.__wrapped__()


def test_a_mac_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delitem(sys.modules, "mlx.core")
    assert openblas.load_openblas.__wrapped__() is None
    assert blas.blas_line() is None
