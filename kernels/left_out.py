"""Remembers the kernels that `paged-kv doctor` found wrong or slow on this device, so that plain
operations stand in for them.

A file in the cache folder holds them. What was found holds for the device and the versions it was
found with: a later version may be right.
"""

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from paged_kv.kernels.pages.warn_once import warn_once

# Stands among the kernels for steps that are recorded: what is left out then is the recording.
COMPILED_STEPS = "compiled steps"


def left_out_file() -> Path:
    """left-out-kernels.json in the folder paged-kv of $XDG_CACHE_HOME, or of ~/.cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "paged-kv" / "left-out-kernels.json"


def device_name() -> str:
    """What MLX calls the device that it computes on."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def left_out(variant: str) -> dict[str, str]:
    """The names of kernels that are left out, and why.

    Args:
        variant: of the backend, such as "metal" or "native (avx2)".
    """
    found = _read().get(_key(variant), {})
    return dict(found) if isinstance(found, dict) else {}


def leave_out(variant: str, kernels: Mapping[str, str]) -> None:
    """Leave out exactly these kernels from now on; the value says why.

    Raises:
        OSError: the file cannot be written.
    """
    others = {key: each for key, each in _read().items() if key != _key(variant)}
    file = left_out_file()
    if kernels or file.exists():
        write_found(file, others | ({_key(variant): dict(kernels)} if kernels else {}))


def write_found(file: Path, found: object) -> None:
    """Write what the doctor has found as JSON, so that other processes read all of it or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(found))
    temporary.replace(file)


def forget_left_out() -> None:
    """Use all kernels of all backends again.

    Raises:
        OSError: the file cannot be deleted.
    """
    left_out_file().unlink(missing_ok=True)


def _key(variant: str) -> str:
    return f"{variant} on {device_name()}, mlx {version('mlx')}, paged_kv {version('paged-kv')}"


def _read() -> dict[str, object]:
    file = left_out_file()
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn_once(f"{file} cannot be read, so all kernels are used: {error}")
        return {}
    return found if isinstance(found, dict) else {}
