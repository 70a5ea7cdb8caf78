"""Checks that --max-kv-bytes holds the pages of the models, before the server says that it starts.

The models are read without their weights, so this takes a fraction of the time of a start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.commands.model_names import NO_DRAFT_MODEL
from paged_kv.integrations.batching.pool_memory import pool_size
from paged_kv.integrations.speculation.draft_models import divided_factories
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.server.options import ServerOptions
from paged_kv.sizes import format_size


def require_sufficient_budget(options: ServerOptions) -> None:
    """Check --max-kv-bytes, if it is a number. A model that is not on this machine yet, or that
    mlx-lm cannot read, is checked when it is loaded.

    Raises:
        ValueError: the models need more.
    """
    budget = options.cache.max_bytes
    if not isinstance(budget, int):
        return
    names = [options.model, options.draft_model]
    models = [_without_weights(name) for name in names if name not in NO_DRAFT_MODEL]
    known = [model for model in models if model is not None]
    if known and len(known) == len(models):
        needed = budget
        while lacking := _lacking(known, needed, options):
            needed += lacking
        if needed > budget:
            raise _too_small(budget, needed, options)


@contextmanager
def budget_named(options: ServerOptions) -> Iterator[None]:
    """Let an exhausted pool name the option of the budget.

    Raises:
        ValueError: the models that are loaded need more.
    """
    try:
        yield
    except PoolExhausted as error:
        raise _too_small(error.budget, error.sufficient_budget, options) from None


def _without_weights(name: str) -> Module | None:
    """A model whose weights stay on disk; None if it is not there, or not mlx-lm's."""
    try:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(name, local_files_only=True))
        model: Module = load_model(folder, lazy=True)[0]
    except Exception:
        # Loading it raises the same, with the words for it.
        return None
    return model


def _lacking(models: list[Module], budget: int, options: ServerOptions) -> int:
    """The bytes that a budget lacks for a sequence of one token, as far as its pools can tell; 0 if
    it fits."""
    try:
        cache = replace(options.cache, max_bytes=budget, store=None, offload=None)
        factories = divided_factories(models, cache, dtype=options.dtype)
        for factory in factories:
            factory.can_admit(0)  # makes its pool learn the size of a block
    except PoolExhausted as error:
        # Without it, other layers may need more.
        known = error.sufficient_budget or error.needed * error.block_bytes
        return _of_all(max(1, known - error.budget), error.budget, budget)
    sizes = [pool_size(factory.pool) for factory in factories]
    return max(
        _of_all(max(0, size.bytes_for(1) - size.promisable), size.budget, budget) for size in sizes
    )


def _of_all(lacking: int, share: int, budget: int) -> int:
    """What a budget lacks if a pool's share of it lacks so much."""
    return -(-lacking * budget // share)


def _too_small(budget: int, needed: int | None, options: ServerOptions) -> ValueError:
    is_given = isinstance(options.cache.max_bytes, int)
    option = "--max-kv-bytes" if is_given else "the machine's memory"
    models = "the model needs" if options.draft_model in NO_DRAFT_MODEL else "the models need"
    least = "more" if needed is None else f"at least {format_size(needed)} ({needed:,} bytes)"
    return ValueError(
        f"{option} gives pages {format_size(budget)}, and {models} {least} for a block of "
        f"{PAGE_SIZE} tokens: give --max-kv-bytes more, or choose a smaller --model"
    )
