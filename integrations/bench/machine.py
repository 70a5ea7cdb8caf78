"""Names the machine and the versions that something was measured on."""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Chip, cores, bytes of memory, and system. No name of a user or a host."""
    return {
        "chip": chip(),
        "cores": f"{os.cpu_count()} cores",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }


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
