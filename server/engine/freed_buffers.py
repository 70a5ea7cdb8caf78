"""Says how many bytes of freed buffers a server lets MLX keep.

MLX keeps freed buffers for later arrays of about their size. On Metal and CUDA it keeps as many as
memory holds, so a process that computes steps of all lengths grows past what its weights and pages
take. What the layers of one prompt step hand on to each other is enough: no limit from 0 upwards
changed the throughput of a CPU by more than its noise (benches/freed_buffers.py), and a decode step
needs less. mlx-lm gives everything back after each prompt step.
"""

from __future__ import annotations

from typing import Any


def freed_buffers_limit(model: Any, step_tokens: int) -> int:
    """The bytes of freed buffers that a prompt step of so many tokens can use again: twice what the
    matrices of a layer put out, of the layer with the most.

    An operation between two matrices has an output as large as its input, hence twice. In float32,
    a llama of hidden size 1024 has 96 MB for 1,024 tokens, and a step held 79 MB at its peak.
    """
    return 2 * step_tokens * max(map(_output_bytes, filter(None, model.layers)), default=0)


def _output_bytes(layer: Any) -> int:
    """Bytes that all matrices of a layer put out for a token. A quantised one computes in the dtype
    of its scales."""
    matrices = [
        (each["weight"], each.get("scales", each["weight"]).dtype)
        for each in layer.modules()
        if "weight" in each and each["weight"].ndim > 1
    ]
    return sum(weight.shape[-2] * dtype.size for weight, dtype in matrices)
