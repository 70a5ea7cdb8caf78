"""Describes the graph of a function, so that two can be compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from paged_kv.steps.recorded import NotRecordable

# Longer constants are weights: no model makes such from the numbers of a step.
LONGEST_COMPARED = 4096

_stock_contiguous: Callable[..., mx.array] = mx.contiguous
_exporting = threading.local()


class NotExportable(Exception):
    """MLX cannot export an operation of a graph; the message names it."""


Function = Callable[..., Iterable[mx.array]]


def exported_graph(function: Function, arrays: list[mx.array]) -> list[str]:
    """The operations of a function of these arrays with their arguments, and its constants.

    Raises:
        NotRecordable: a constant cannot be computed.
        NotExportable: MLX cannot export one of the operations.
        Exception: whatever the function raises.
    """
    found: list[dict[str, Any]] = []
    _exporting.is_on = True
    try:
        mx.export_function(found.append, function, *arrays)
    except ValueError as error:
        if "Unable to get state for primitive" in str(error):
            raise NotExportable(str(error)) from error
        raise
    finally:
        _exporting.is_on = False
    return [
        str(each) if each["type"] != "constants" else str(list(map(_described, each["constants"])))
        for each in found
    ]


def contiguous(a: mx.array, /, allow_col_major: bool = False, *, stream: Any = None) -> mx.array:
    """`mx.contiguous`; another operation without effect while this thread exports, because MLX
    cannot export this one."""
    if getattr(_exporting, "is_on", False):
        return mx.stop_gradient(a)
    return _stock_contiguous(a, allow_col_major, stream=stream)


EXPORTABLE: dict[Callable[..., Any], Callable[..., Any]] = {_stock_contiguous: contiguous}
"""The operations of MLX that no graph can be exported with, and what takes their places in the
modules of models whose steps are compiled."""


def _described(constant: tuple[str, mx.array]) -> tuple[Any, ...]:
    """A constant's name, shape, dtype and, unless it is long, contents."""
    name, array = constant
    if array.size > LONGEST_COMPARED:
        return name, array.shape, array.dtype
    try:
        contents = np.asarray(mx.flatten(array).view(mx.uint8)).tobytes()
    except RuntimeError as error:
        raise NotRecordable("it computes with keys, values or a mask of all tokens") from error
    return name, array.shape, array.dtype, contents
