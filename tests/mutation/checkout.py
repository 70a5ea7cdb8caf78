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

from tests.mutation.mutants import Mutant, Round

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
    """How a run of tests ended: pytest's status, negative after a signal, None if it took too long.

    `seconds` is how long it took.
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
    """Copies the checkout `source` into the empty folder `root`."""

    def __init__(self, source: Path, root: Path) -> None:
        self.root = root
        shutil.copytree(source, root, symlinks=True, ignore=_left_out, dirs_exist_ok=True)
        (root / f"{PLUGIN}.py").write_text(PLUGIN_TEXT)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant, and restore the code afterwards.

        Raises:
            ValueError: the mutant does not fit the code, or does not compile.
        """
        changed = self.root / mutant.file
        sound = {path: path.read_bytes() for path in (changed, *self._libraries())}
        text = mutant.applied(changed.read_text())
        try:
            changed.write_text(text)
            if mutant.needs_build:
                self._build()
            yield
        finally:
            for path, content in sound.items():
                path.write_bytes(content)

    def run(self, tests: Round, limit_s: float) -> Run:
        """Run tests until one fails or the time is over."""
        options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", PLUGIN]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "-m", tests.marker, *tests.paths],
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        status: int | None = None
        try:
            output, _ = process.communicate(timeout=limit_s)
            status = process.returncode
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            if process.poll() is None:
                # Also ends the processes that the tests have started.
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        return Run(status, output, time.monotonic() - began)

    def python(self, *arguments: str) -> str:
        """What Python prints here."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env={**self._environment, "PAGED_KV_CXXFLAGS": CXX_FLAGS},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.strip()

    def _build(self) -> None:
        for path in self._libraries():
            path.unlink()
        self.python("setup.py", "-q", "build_ext", "--inplace")
        # setup.py goes on if the library does not compile.
        if not self._libraries():
            raise ValueError("the CPU kernels do not compile")

    def _libraries(self) -> list[Path]:
        return [path for path in self.root.glob("kernels/*") if path.suffix in (".so", ".dylib")]

    @property
    def _environment(self) -> dict[str, str]:
        # Python tells compiled files from their source by the time to a second, and by the size.
        return {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}


def _left_out(_: str, names: list[str]) -> list[str]:
    return [name for name in names if _LEFT_OUT.fullmatch(name)]
