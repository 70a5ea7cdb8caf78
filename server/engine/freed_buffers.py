"""Says how many bytes of freed buffers a server lets MLX keep.

MLX keeps freed buffers for later arrays of about their size. On Metal and CUDA it keeps as many as
memory holds, so a process that computes steps of all lengths grows past what its weights and pages
take. What the layers of one prompt step hand on to each other is enough: no limit from 0 upwards
changed the throughput of a CPU by more than its noise, and a decode step needs less. mlx-lm gives
everything back after each prompt step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlx.nn.layers.base import Module


def freed_buffers_limit(model: Any, step_tokens: int) -> int:
    """The bytes of freed buffers that a prompt step of so many tokens can use again: twice what the
    matrices of a layer put out, of the layer with the most.

    An operation between two matrices has an output as large as its input, hence twice. In float32,
    a llama of hidden size 1024 has 96 MB for 1,024 tokens, and a step held 79 MB at its peak.
    """
    return 2 * step_tokens * max(map(_output_bytes, _layers(model)), default=0)


def _layers(model: Any) -> Iterator[Any]:
    """All modules in lists of a model. Layers of other processes are None there."""
    for module in model.modules():
        for children in module.values():
            if isinstance(children, list):
                yield from (each for each in children if isinstance(each, Module))


def _output_bytes(layer: Any) -> int:
    """Bytes that all matrices of a layer put out for a token. A quantised one computes in the dtype
    of its scales."""
    matrices: list[tuple[Any, Any]] = [
        (each["weight"], each.get("scales", each["weight"]).dtype)
        for each in layer.modules()
        if "weight" in each and each["weight"].ndim > 1
    ]
    return sum(weight.shape[-2] * dtype.size for weight, dtype in matrices)
