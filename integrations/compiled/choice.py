"""Decides whether a factory's decode steps are compiled."""

from __future__ import annotations

import os

from paged_kv.checks import described
from paged_kv.kernels.backends import variant
from paged_kv.kernels.faster_steps import are_faster
from paged_kv.kernels.left_out import COMPILED_STEPS, device_name, left_out
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.pages.warn_once import warn_once
from paged_kv.kernels.recorders import recorder_of

VARIABLE = "PAGED_KV_COMPILE"


def compiles(choice: bool | None, backend: Backend) -> bool:
    """Whether steps are recorded: by a factory's argument, else by PAGED_KV_COMPILE, else where
    the doctor has found that right and faster.

    Raises:
        TypeError: the argument is neither a bool nor None.
        ValueError: PAGED_KV_COMPILE is neither 0 nor 1.
    """
    if not isinstance(choice, bool | None):
        raise TypeError(f"compile must be True, False or None, got {described(choice)}")
    named = os.environ.get(VARIABLE)
    if named not in (None, "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {named!r}")
    if choice is not None:
        return choice
    if named is not None:
        return named == "1"
    recorder, name = recorder_of(backend), variant(backend)
    if recorder is None or not recorder.pays or COMPILED_STEPS in left_out(name):
        return False
    if not are_faster(name):
        warn_once(
            f"decode steps are not compiled: run `paged-kv doctor` once, which finds out whether "
            f"that is right and faster on this device ({device_name()})"
        )
        return False
    return True
