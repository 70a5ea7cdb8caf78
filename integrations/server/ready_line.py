"""Says in one line of the log that a server is ready, and with what."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from paged_kv.blas_in_use import blas_name
from paged_kv.integrations.server.generation.paged_model_provider import PagedModelProvider
from paged_kv.sizes import format_size


def ready_line(host: str, port: int, name: str, provider: PagedModelProvider) -> str:
    """The address, and what serves there.

    Args:
        host: that the server listens at.
        port: of it.
        name: of the model, as answers have it.
        provider: has loaded the model, or loads one with the first request.
    """
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    parts = [f"ready at {address}", f"page {address}/kv"]
    if not provider.factories:
        return ", ".join([*parts, "no model yet: requests name one"])
    pool = provider.factories[0].pool
    parts += [f"model {name}", f"backend {pool.backend.name}"]
    if blas := blas_name():
        parts.append(f"BLAS {blas}")
    parts.append(f"numbers {_dtype(provider.model)}")
    parts.append(f"pages {provider.cli_args.page_format}")
    budget = sum(factory.pool.budget.max_bytes for factory in provider.factories)
    return ", ".join([*parts, f"up to {format_size(budget)} of them"])


def _dtype(model: Any) -> str:
    """The number format that a model computes in: of its weights, or of their scales."""
    arrays: Any = tree_flatten(model.parameters())
    found = (each.dtype for _, each in arrays if mx.issubdtype(each.dtype, mx.floating))
    return str(next(found, "unknown")).removeprefix("mlx.core.")
