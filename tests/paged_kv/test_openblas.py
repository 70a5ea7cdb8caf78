"""OpenBLAS serves MLX where it is installed, and nothing fails where it is not."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, openblas
from paged_kv.integrations import slow_products
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.doctor import examination
from paged_kv.integrations.speculation.draft_models import divided_factories
from paged_kv.kernels.pages.errors import warn_once
from tests.support.folders import ROOT
from tests.support.grids import plain_only
from tests.support.zoo import small_model

PACKAGED = "libscipy_openblas.so"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")
needs_package = pytest.mark.skipif(
    openblas._file_of_package() is None or not openblas._NAMES.exists(),
    reason=f"needs {openblas.PACKAGE} and a build with a C compiler",
)
SHOW = """
from paged_kv.openblas import library_in_use
print(library_in_use().name)
"""


def printed(code: str, **environment: str) -> str:
    """What a new process prints: as in one of a user, nothing has loaded OpenBLAS for it."""
    kept = {name: value for name, value in os.environ.items() if name != "PAGED_KV_BLAS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=kept | environment
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).strip()


def names_that_mlx_links() -> set[str]:
    """The functions of BLAS and LAPACK among the strings of MLX's library."""
    library = Path(mx.__file__).parent / "lib" / "libmlx.so"
    name = rb"(?<=\0)(?:cblas_[a-z]+|[sdcz](?:ge|he|or|po|sy|tr|un)[a-z]+_)(?=\0)"
    return {found.decode() for found in re.findall(name, library.read_bytes())}


@pytest.mark.slow
@needs_package
def test_every_function_that_mlx_links_comes_from_the_package() -> None:
    names = names_that_mlx_links()
    source = (ROOT / "kernels" / "cpu" / "openblas_names.c").read_text()
    assert set(re.findall(r"\bDO\((\w+)\)", source)) == names
    code = f"""
import paged_kv, mlx.core
from paged_kv import openblas
for openblas._FUNCTION in {sorted(names)}:
    print(openblas.library_in_use().name)
"""
    assert printed(code).split() == [PACKAGED] * len(names)


@needs_package
@pytest.mark.parametrize(
    "first",
    plain_only(
        ["import paged_kv, mlx.core"],
        [
            "import paged_kv, mlx.core",
            "from paged_kv import PagePool",
            "from paged_kv.openblas import load_openblas; load_openblas(); import mlx.core",
        ],
    ),
    ids=["package", "name", "function"],
)
def test_whatever_imports_mlx_after_paged_kv_has_the_package(first: str) -> None:
    assert printed(first + SHOW).split()[-1] == PACKAGED


SYSTEM = """
import sys
from paged_kv import openblas
sys.exit(openblas._load_of_system() is None)
"""


@pytest.fixture(scope="module")
def _system_openblas() -> None:
    if subprocess.run([sys.executable, "-c", SYSTEM], cwd=ROOT, check=False).returncode:
        pytest.skip("OpenBLAS is not installed in the system")


@linux_only
@pytest.mark.usefixtures("_system_openblas")
@pytest.mark.parametrize(
    ("without", "environment"),
    [
        ("", {"PAGED_KV_BLAS": "system"}),
        ("openblas._file_of_package = lambda: None", {}),
        ("openblas._NAMES = openblas.Path('/nothing')", {}),
    ],
    ids=["preferred", "no package", "no compiler"],
)
def test_the_systems_serves_where_it_is_preferred_or_alone(
    without: str, environment: dict[str, str]
) -> None:
    line = "from paged_kv.integrations.doctor.examination import blas_line; print(blas_line())"
    said = printed(f"from paged_kv import openblas\n{without}\n{line}", **environment)
    assert said.startswith("BLAS of MLX: OpenBLAS 0.")
    assert PACKAGED not in said


@pytest.fixture
def cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    warn_once.cache_clear()
    yield
    mx.set_default_device(before)


@pytest.fixture
def reference_blas(cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing has loaded OpenBLAS."""
    for module in (slow_products, examination):
        monkeypatch.setattr(module, "library_in_use", lambda: Path("/x/libblas-1.so.3"))
        monkeypatch.setattr(module, "openblas_version", lambda library: None)
    monkeypatch.delenv("PAGED_KV_BLAS", raising=False)
    monkeypatch.setattr(openblas, "_file_of_package", lambda: Path(PACKAGED))
    monkeypatch.setattr(openblas, "_NAMES", Path(__file__))


def model_in(dtype: mx.Dtype) -> Any:
    model = small_model("qwen3", num_hidden_layers=1)
    model.set_dtype(dtype)
    return model


OF_SYSTEM = "apt install libopenblas0-pthread, dnf install openblas, or pacman -S openblas"


@linux_only
@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"_NAMES": Path("/x")}, f"install a C compiler and then paged_kv again, or {OF_SYSTEM}"),
        ({"_file_of_package": lambda: None}, f"pip install scipy-openblas32, or {OF_SYSTEM}"),
        ({"load_openblas": cache(lambda: None)}, "import paged_kv before mlx"),
    ],
    ids=["no compiler", "no package", "mlx first"],
)
def test_without_openblas_doctor_and_log_say_what_serves_and_what_to_do(
    changes: dict[str, Any],
    remedy: str,
    reference_blas: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(openblas, name, value)
    line = str(examination.blas_line())
    assert "libblas-1.so.3, " in line
    assert line.endswith(f"paged_kv uses it where it is installed: {remedy}")
    for _ in range(2):
        PagedCacheFactory(model_in(mx.float32), max_bytes="8MB").close()
    assert caplog.messages == [
        "MLX multiplies float32 matrices with libblas-1.so.3, many times slower than OpenBLAS: "
        + remedy
    ]


@linux_only
@pytest.mark.parametrize(
    ("dtype", "converted", "hint"),
    [
        (mx.bfloat16, None, "MLX multiplies bfloat16 matrices slowly on a CPU: --dtype float32 "),
        (mx.float16, None, "MLX multiplies float16 matrices slowly on a CPU: --dtype float32 "),
        (mx.float32, None, None),
        (mx.float16, "float32", None),
    ],
)
def test_a_command_in_16_bits_on_a_cpu_is_told_of_dtype(
    dtype: mx.Dtype,
    converted: str | None,
    hint: str | None,
    cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(slow_products, "openblas_version", lambda library: "OpenBLAS 0.3.30")
    model = model_in(dtype)
    divided_factories([model], CacheOptions(max_bytes="8MB"), dtype=converted)[0].close()
    assert caplog.messages == []
    slow_products.warn_of_slow_products(model, in_command=True)
    assert [message.startswith(hint or "-") for message in caplog.messages] == [True] * bool(hint)
