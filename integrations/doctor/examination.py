"""Says what is known of the kernels on this device, checks all of them again, and writes one file
with all that an issue needs."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from paged_kv.integrations.bench.turns import seconds
from paged_kv.kernels.backends import device_backend
from paged_kv.kernels.cpu.native_library import load_native_library
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.self_test import Check, checks
from paged_kv.kernels.pages.verdicts import RIGHT, TRYING, device_name, forget_verdicts, verdicts_on
from paged_kv.openblas import how_to_get_openblas, library_in_use, openblas_version
from paged_kv.options import require_writable

_IF_WRONG = (
    "plain MLX operations serve everything from now on, unless PAGED_KV_BACKEND names a backend or "
    "PAGED_KV_CERTIFY is 0",
    "`paged-kv doctor --again` checks everything again. Please report it: "
    "paged-kv doctor --report report.md",
)


def known(*, verbose: bool) -> tuple[bool, str]:
    """Whether no kernel is known to be wrong here, and the verdict, all that is wrong, and the
    system; with `verbose` also all that is right."""
    backend = device_backend()
    checked = verdicts_on(backend.variant, backend.build).found
    # Another process checks others at this moment.
    found = {kernel: verdict for kernel, verdict in checked.items() if verdict != TRYING}
    right = [f"right  {kernel}" for kernel, verdict in found.items() if verdict == RIGHT]
    wrong = [f"WRONG  {kernel}: {verdict}" for kernel, verdict in found.items() if verdict != RIGHT]
    verdict = [f"{len(right)} of {len(found)} checks on this device found kernels right"]
    if not found:
        verdict = [
            "no kernel was checked on this device so far: each is, before its first use",
            "`paged-kv doctor --again` checks all of them now",
        ]
    verdict += _IF_WRONG if wrong else ()
    parts = verdict, wrong, _system(backend), right if verbose else ()
    return not wrong, "\n\n".join(filter(None, map("\n".join, parts)))


def examine() -> list[str]:
    """Run all checks, and let what they find hold in the place of what was known. Prints and
    returns a line for each, as soon as it is known: the one after the last may hang a device.

    Raises:
        OSError: the file of verdicts cannot be deleted.
    """
    forget_verdicts()
    backend, lines = device_backend(), []

    def failure(check: Check) -> str | None:
        start = perf_counter()
        passed, finding = check.result()
        verdict, milliseconds = "right" if passed else "WRONG", 1e3 * (perf_counter() - start)
        lines.append(f"{verdict}  {check.name:<42} {milliseconds:9.1f} ms  {finding}")
        print(lines[-1], flush=True)
        return None if passed else finding

    for check in checks(backend):
        verdicts_on(backend.variant, backend.build).check_again(check.name, partial(failure, check))
    print()
    return lines


def _system(backend: Backend) -> list[str]:
    """Lines about the backend, the device and the BLAS."""
    lines = [
        f"backend: {backend.variant}, because {_reason()}",
        f"device: {device_name()}; mlx {version('mlx')}; Python {sys.version.split()[0]}",
    ]
    blas = blas_line()
    return [*lines, blas] if blas else lines


def _reason() -> str:
    if "PAGED_KV_BACKEND" in os.environ:
        return "PAGED_KV_BACKEND names it"
    if mx.default_device().type == mx.gpu:
        return f"MLX computes on {mx.default_device()}"
    library, missing = load_native_library()
    if library is None:
        return f"MLX computes on a CPU, and of the CPU kernels {missing}"
    return "MLX computes on a CPU, and the CPU kernels run here"


_SIZE, _REPETITIONS = 512, 3


def blas_line() -> str | None:
    """A line about the BLAS; None where MLX does not use one that could be replaced: on a GPU, and
    on a Mac."""
    if sys.platform != "linux" or mx.default_device().type != mx.cpu:
        return None
    library = library_in_use()
    speed = f"{_flops() / 1e9:.1f} GFLOP/s in float32"
    if library is None:
        return f"BLAS of MLX: unknown, {speed}"
    if version := openblas_version(library):
        return f"BLAS of MLX: {version}, {library}, {speed}"
    return (
        f"BLAS of MLX: {library.name}, {speed}; OpenBLAS is many times as fast for models in "
        f"float32, and paged_kv uses it where it is installed: {how_to_get_openblas()}"
    )


def _flops() -> float:
    """Floating-point operations a second of a product of float32 matrices, in the best of a few
    tries."""
    one, other = (mx.random.normal((_SIZE, _SIZE)) for _ in range(2))
    mx.eval(one, other)
    return 2 * _SIZE**3 / min(seconds(lambda: mx.eval(one @ other)) for _ in range(_REPETITIONS))


def write_report(file: Path) -> int:
    """Examine the kernels, run a quick bench of the embedded model, and write all that was found,
    the versions and the log to a Markdown file.

    Args:
        file: the file to write.

    Returns:
        1 if a kernel was wrong, else 0.

    Raises:
        OSError: the file cannot be written; raised before anything runs.
    """
    # Imported here because loading mlx-lm takes seconds.
    from paged_kv.integrations.bench.bench_command import measured
    from paged_kv.integrations.bench.comparisons import QUICK
    from paged_kv.integrations.bench.report import as_table

    require_writable(file)
    _, before = known(verbose=True)
    with _logged() as log:
        each = examine()
        are_right, found = known(verbose=False)
        print(found)
        content, outcomes = measured(None, QUICK)
        benched = as_table(content, outcomes)
        print(benched, end="")
    sections = {
        "paged-kv doctor": found,
        "Each check": "\n".join(each),
        "What was known before": before,
        "paged-kv bench --quick": benched,
        "Log": log.getvalue(),
        "Bench as JSON": json.dumps(content, indent=2),
    }
    file.write_text(anonymous("\n".join(map(_section, sections.keys(), sections.values()))))
    print(f"wrote {file}: please look through it, and attach it to an issue")
    return 0 if are_right else 1


def anonymous(text: str) -> str:
    """The text without the names of the user's folders."""
    folders = {
        os.getcwd(): ".",
        tempfile.gettempdir(): "$TMPDIR",
        os.path.expanduser("~"): "~",
    }
    for folder in sorted(folders, key=len, reverse=True):
        if folder != os.sep:
            text = text.replace(folder, folders[folder])
    return text


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```\n{text.rstrip()}\n```\n"


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    """What paged_kv logs within, from the level "debug"."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("paged_kv")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # for the file, not for the terminal
    try:
        yield text
    finally:
        logger.level, logger.propagate = before
        logger.removeHandler(handler)
