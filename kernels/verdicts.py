"""Remembers what `paged-kv doctor` found of the backends on this device.

A file in the cache folder holds it. A verdict holds for the device and the versions it was found
with: a later version may be right.
"""

import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from paged_kv.kernels.pages.warn_once import warn_once


@dataclass(frozen=True)
class Verdict:
    """What the doctor found of a backend.

    Attributes:
        disabled: whether a kernel is wrong, so that plain operations serve everything.
        compiles: whether compiled steps are right and faster than steps that Python takes.
    """

    disabled: bool
    compiles: bool = False


def verdict_on(variant: str) -> Verdict | None:
    """The latest verdict on a backend; None if the doctor has not examined it here.

    Args:
        variant: of the backend, such as "metal" or "native (avx2)".
    """
    return _read().get(_key(variant))


def record_verdict(variant: str, verdict: Verdict) -> None:
    """Let a verdict hold from now on. Other processes read all of the file or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    file = verdict_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    verdicts = _read() | {_key(variant): verdict}
    temporary.write_text(json.dumps({key: asdict(each) for key, each in verdicts.items()}))
    temporary.replace(file)


def forget_verdicts() -> None:
    """Use all backends again, and compile no steps until the doctor has looked again.

    Raises:
        OSError: the file cannot be deleted.
    """
    verdict_file().unlink(missing_ok=True)


def verdict_file() -> Path:
    """verdicts.json in the folder paged-kv of $XDG_CACHE_HOME, or of ~/.cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "paged-kv" / "verdicts.json"


def device_name() -> str:
    """What MLX calls the device that it computes on."""
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def _key(variant: str) -> str:
    try:
        mlx_lm = version("mlx-lm")
    except PackageNotFoundError:
        mlx_lm = "none"
    versions = f"mlx {version('mlx')}, mlx-lm {mlx_lm}, paged_kv {version('paged-kv')}"
    return f"{variant} on {device_name()}, {versions}"


def _read() -> dict[str, Verdict]:
    file = verdict_file()
    try:
        return {key: Verdict(**each) for key, each in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warn_once(f"{file} cannot be read, so no backend is disabled: {error}")
        return {}
