"""Reports measurements: a table, a JSON file, a plot."""

from __future__ import annotations

import io
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from paged_kv import __version__
from paged_kv.checks import format_size
from paged_kv.commands.plain_console import PlainConsole
from paged_kv.extras import extra_module
from paged_kv.integrations.bench.comparisons import Outcome
from paged_kv.integrations.bench.turns import MOST_SPREAD, Measurement, Skipped
from paged_kv.kernels.pages.verdicts import device_name

_PLOTS = (".svg", ".png", ".pdf")


def as_dict(model: str, backend: str, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Everything, ready for JSON. It names the machine's chip and no person."""
    return {
        "machine": machine(),
        "versions": {"paged-kv": __version__, **versions()},
        "model": model,
        "backend": backend,
        "outcomes": [
            {**asdict(each), "verdict": each.verdict}
            if isinstance(each, Measurement)
            else asdict(each)
            for each in outcomes
        ],
    }


def as_table(content: dict[str, Any], outcomes: Iterable[Outcome]) -> str:
    """A report as text, as wide as the terminal."""
    text = io.StringIO()
    console = PlainConsole(file=text)
    console.print(f"{content['model']}, {content['backend']} backend\n{measured_on(content)}")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("mlx-lm", justify="right")
    table.add_column("paged_kv", justify="right")
    table.add_column("better")
    for each in outcomes:
        if isinstance(each, Skipped):
            table.add_row(each.name, "", "", f"skipped: {each.reason}")
        else:
            numbers = (_number(each, each.mlx_lm), _number(each, each.paged))
            table.add_row(each.name, *numbers, each.verdict)
    console.print(table)
    return text.getvalue()


def require_drawable(file: Path) -> None:
    """Check that a plot can be written, before there is one.

    Raises:
        ValueError: matplotlib is not installed, or `draw` cannot write such a file.
    """
    extra_module("matplotlib", "plot")
    if file.suffix not in _PLOTS:
        raise ValueError(f"{file} must end in one of {', '.join(_PLOTS)}")


def draw(content: dict[str, Any], outcomes: Iterable[Outcome], file: Path) -> None:
    """Plot how many times better pages are, to a file that `require_drawable` takes."""
    figures = extra_module("matplotlib.figure", "plot")
    measured = [each for each in outcomes if isinstance(each, Measurement)]
    clear = [each for each in measured if each.spread <= MOST_SPREAD]
    figure = figures.Figure(figsize=(8, 1 + 0.3 * len(clear)), layout="constrained")
    axes = figure.subplots()
    factors = [each.times_better for each in clear]
    colours = ["#009e73" if factor >= 1 else "#d55e00" for factor in factors]
    axes.barh([each.name for each in clear], factors, color=colours)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="times better than mlx-lm's caches")
    axes.set_title(content["model"], parse_math=False)
    figure.savefig(file)


def _number(measurement: Measurement, number: float) -> str:
    if measurement.unit == "bytes":
        return format_size(int(number))
    return f"{1e3 * number:,.3g} ms" if number < 1 else f"{number:,.2f} s"


def machine() -> dict[str, Any]:
    """Chip, cores, bytes of memory, and system. No name of a user or a host.

    The chip is the processor; on a machine with an NVIDIA GPU that MLX computes on, also the GPU.
    """
    on_cuda = mx.default_device().type == mx.gpu and platform.system() != "Darwin"
    return {
        "chip": f"{device_name()} with {chip()}" if on_cuda else chip(),
        "cores": f"{os.cpu_count()} cores",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def measured_on(content: dict[str, Any]) -> str:
    """The `machine` and `versions` of a report or results file, in one line.

    Memory is in GiB, as machines are sold with it: a kernel keeps some, so it is rounded.
    """
    machine = content["machine"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    where = f"{machine['chip']}, {machine['cores']}, {memory}, {machine['system']}"
    return where + "; " + ", ".join(f"{name} {v}" for name, v in content["versions"].items())


def versions() -> dict[str, str]:
    """Of Python and of the packages that numbers depend on."""
    packages = {name: version(name) for name in ("mlx", "mlx-lm", "numpy")}
    return {"python": platform.python_version(), **packages}


def chip() -> str:
    """The processor as it calls itself, or the architecture where it does not."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return names[0] if names else platform.machine()
