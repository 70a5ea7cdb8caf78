"""Writes the numbers of benches to files: one for each bench, machine and version of MLX."""

import json
import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def write_result(bench: str, figures: dict[str, Any]) -> Path:
    """Write the figures of a bench beside what they were measured on; returns the file.

    The file is benches/results/<bench>-<chip>-<cores>-mlx-<version>.json, and a later run of the
    same bench on the same machine takes its place.
    """
    machine, versions = _machine(), _versions()
    name = f"{bench} {machine['chip']} {machine['cores']} mlx {versions['mlx']}"
    path = RESULTS / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.json"
    content = {"bench": bench, "machine": machine, "versions": versions, "figures": figures}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _machine() -> dict[str, Any]:
    return {
        "chip": _chip(),
        "cores": f"{os.cpu_count()} cores",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("mlx", "mlx-lm", "numpy")}
    return {"python": platform.python_version(), **packages}


def _chip() -> str:
    """The processor as it calls itself, or the architecture where it does not."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return names[0] if names else platform.machine()
