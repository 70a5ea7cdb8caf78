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
from paged_kv.integrations.speculation.draft_models import divided_factories
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.server.options import ServerOptions
from paged_kv.sizes import MOST_BYTES, format_size


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
        needed = _sufficient(known, budget, options)
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


def _sufficient(models: list[Module], budget: int, options: ServerOptions) -> int:
    """A budget, at least this one, that holds a sequence of one token."""
    ample = MOST_BYTES
    cache = replace(options.cache, max_bytes=ample, store=None, offload=None)
    factories = divided_factories(models, cache, dtype=options.dtype)
    for factory in factories:
        factory.can_admit(0)  # makes its pool learn the size of a block
    needed = 0
    while needed < budget:  # of which each pool gets a share
        needed = budget
        for pool in [factory.pool for factory in factories]:
            share = pool.budget.max_bytes
            least = max(1, needed * share // ample)
            held = pool.reclaimer.holding(pool.size.bytes_for(1), least)
            budget = max(budget, -(-held * ample // share))
    return needed


def _too_small(budget: int, needed: int | None, options: ServerOptions) -> ValueError:
    is_given = isinstance(options.cache.max_bytes, int)
    option = "--max-kv-bytes" if is_given else "the machine's memory"
    models = "the model needs" if options.draft_model in NO_DRAFT_MODEL else "the models need"
    least = "more" if needed is None else f"at least {format_size(needed)} ({needed:,} bytes)"
    return ValueError(
        f"{option} gives pages {format_size(budget)}, and {models} {least} for a block of "
        f"{PAGE_SIZE} tokens: give --max-kv-bytes more, or choose a smaller --model"
    )
