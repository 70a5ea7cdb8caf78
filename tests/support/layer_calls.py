"""Counts the project's own Python calls in a layer's step."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx

import paged_kv

HOME = str(Path(paged_kv.__file__).parent)


def calls_of_layers(model: Any, cache: list[Any], batch: int) -> list[Counter[str]]:
    """Before the first layer of a step of one token, and for each layer, the number of calls of
    each function, by file and name."""
    parts: list[Counter[str]] = [Counter()]
    own = set(map(id, model.layers))

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_name == "__call__" and id(frame.f_locals.get("self")) in own:
            parts.append(Counter())
        elif code.co_filename.startswith(HOME):
            parts[-1][f"{Path(code.co_filename).name}:{code.co_name}"] += 1

    sys.setprofile(note)
    try:
        logits = model(mx.ones((batch, 1), mx.int32), cache=cache)
    finally:
        sys.setprofile(None)
    mx.eval(logits)
    return parts
