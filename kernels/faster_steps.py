"""Remembers where `paged-kv doctor` found compiled steps right and faster than steps that Python
takes: elsewhere none are compiled unless asked for.

A file in the cache folder holds it, for the device and the versions it was found with.
"""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paged_kv.kernels.left_out import device_name, left_out_file, write_found


def are_faster(variant: str) -> bool:
    """Whether compiled steps of a backend were found right and faster here; see `left_out`."""
    return _key(variant) in _read()


def note_faster(variant: str, *, is_so: bool) -> None:
    """Note what was found.

    Raises:
        OSError: the file cannot be written.
    """
    before = _read()
    found = before - {_key(variant)} | ({_key(variant)} if is_so else set())
    if found != before:
        write_found(_file(), sorted(found))


def forget_faster() -> None:
    """Compile no steps until the doctor has looked again.

    Raises:
        OSError: the file cannot be deleted.
    """
    _file().unlink(missing_ok=True)


def _file() -> Path:
    return left_out_file().with_name("faster-steps.json")


def _key(variant: str) -> str:
    try:
        mlx_lm = version("mlx-lm")
    except PackageNotFoundError:
        mlx_lm = "none"
    versions = f"mlx {version('mlx')}, mlx-lm {mlx_lm}, paged_kv {version('paged-kv')}"
    return f"{variant} on {device_name()}, {versions}"


def _read() -> set[str]:
    """What cannot be read counts as not found."""
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return set()
    return set(map(str, found)) if isinstance(found, list) else set()
