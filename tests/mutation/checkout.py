"""A copy of the checkout, in which the tool breaks code and runs tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant

# The least optimisation that keeps the tests quick: a build takes 15 s, and three times as long
# with the flags of a release.
CXX_FLAGS = "-O1"
# Hidden folders and build outputs would only make the copy large. Tests read `.ci`.
_LEFT_OUT = re.compile(r"\.(?!ci$).*|__pycache__|build|dist|artefacts|.*\.egg-info")


# Hypothesis would take a minute to shrink a failing example, which nobody reads here.
PLUGIN = "unshrunk_examples"
PLUGIN_TEXT = """
from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")
"""


@dataclass(frozen=True)
class Run:
    """How a run of tests ended.

    Attributes:
        status: what pytest returned, negative if a signal ended it; None if it took too long.
        output: of pytest.
        seconds: that it took.
    """

    status: int | None
    output: str
    seconds: float

    @property
    def ran_nothing(self) -> bool:
        """Whether all tests were skipped, or none selected."""
        is_over = self.status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        return is_over and " passed" not in self.output

    @property
    def failure(self) -> str:
        """The name of the first test that failed."""
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)
        return found[1] if found else ""


class Checkout:
    """Makes a copy in `folder`, which must be empty.

    Args:
        source: the checkout; it is never written.
        folder: where the copy goes.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder
        shutil.copytree(source, folder, symlinks=True, ignore=_left_out, dirs_exist_ok=True)
        (folder / f"{PLUGIN}.py").write_text(PLUGIN_TEXT)
        self._library: dict[Path, bytes] = {}

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant, and restore the code afterwards.

        Raises:
            ValueError: the mutant does not fit the code, or does not compile.
        """
        path = self.root / mutant.file
        sound = path.read_text()
        path.write_text(mutant.applied(sound))
        try:
            if mutant.needs_build:
                self._build()
            yield
        finally:
            path.write_text(sound)
            for library, content in self._library.items():
                library.write_bytes(content)

    def build(self) -> None:
        """Compile the sound CPU kernels with the flags of mutants.

        Raises:
            ValueError: that failed.
        """
        self._build()
        self._library = {path: path.read_bytes() for path in self._libraries()}

    def run(self, tests: tuple[str, ...], isa: str, marker: str, limit_s: float) -> Run:
        """Run the tests that a marker expression selects, until one fails or the time is over."""
        options = ["-x", "-q", "-rfE", "--tb=no", "-m", marker]
        options += ["-p", "no:cacheprovider", "-p", PLUGIN]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.root,
            env=self._environment(isa),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # Also ends the processes that the tests have started.
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Run(None, output, time.monotonic() - began)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Run(process.returncode, output, time.monotonic() - began)

    def says(self, code: str) -> str:
        """The output of a line of Python here."""
        return self._python("-c", code).stdout.strip()

    def _build(self) -> None:
        for path in self._libraries():
            path.unlink()
        ended = self._python("setup.py", "-q", "build_ext", "--inplace")
        # setup.py goes on if the library does not compile.
        if not self._libraries():
            raise ValueError(f"the CPU kernels do not compile: {ended.stderr}")

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env={**self._environment(), "PAGED_KV_CXXFLAGS": CXX_FLAGS},
            check=True,
            capture_output=True,
            text=True,
        )

    def _libraries(self) -> list[Path]:
        return [
            path for path in (self.root / "kernels").iterdir() if path.suffix in (".so", ".dylib")
        ]

    def _environment(self, isa: str = "") -> dict[str, str]:
        # Python tells compiled files from their source by the time to a second, and by the size.
        environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        return {**environment, "PAGED_KV_ISA": isa} if isa else environment


def _left_out(_: str, names: list[str]) -> list[str]:
    return [name for name in names if _LEFT_OUT.fullmatch(name)]
