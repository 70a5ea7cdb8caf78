"""Makes drafts by name for the commands, and divides memory between a model and its draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import load

from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.integrations.heads.loading import FAMILIES, is_head, load_head, load_own_head
from paged_kv.integrations.heads.prediction_head import PredictionHead
from paged_kv.integrations.mlx_lm_internals import downloaded
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.integrations.speculation.drafts import Draft, HeadDraft, ModelDraft, NGramDraft
from paged_kv.integrations.speculation.rollback import require_rollback
from paged_kv.options import AUTO_HEAD, NGRAM, OWN_HEAD, not_loaded


def load_draft_model(
    name: str | None, model: Module, path: str, tokenizer: Any, *, lazy: bool = False
) -> Module | None:
    """Load the draft model, or the prediction head, of this folder or repository, or the head that
    comes with the model for `OWN_HEAD` and `AUTO_HEAD`; None for None and for `NGRAM`, and for
    `AUTO_HEAD` if no head comes with the model.

    Args:
        name: of the draft.
        model: the model that verifies the drafts.
        path: the folder or repository that it was loaded from.
        tokenizer: of the model.
        lazy: whether to leave the weights on disk until they are used.

    Raises:
        ValueError: it cannot be loaded, or its vocabulary is another one.
    """
    if name is None or name == NGRAM:
        return None
    if name in (OWN_HEAD, AUTO_HEAD):
        own = load_own_head(model, _folder_of(path))
        if own is None and name == OWN_HEAD:
            raise ValueError(
                f"no prediction head comes with {path}: those of {', '.join(sorted(FAMILIES))} are "
                "trained with one, which conversions often leave out. Take the original files, or "
                "name the folder of a head, or another draft"
            )
        return own
    draft: Module
    try:
        folder = _folder_of(name)
        if is_head(folder):
            return load_head(folder)
        draft, drafting_tokenizer = load(name, lazy=lazy)[:2]
    except Exception as error:
        raise not_loaded("--draft-model", name, error) from error
    if drafting_tokenizer.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"the draft model {name} has a vocabulary of {drafting_tokenizer.vocab_size} tokens, "
            f"and the model one of {tokenizer.vocab_size}: choose a draft model of the same "
            f"family, or {NGRAM!r}, which needs none"
        )
    return draft


def _folder_of(name: str) -> Path:
    """The folder of a model, which is downloaded if nothing has this path."""
    return downloaded(str(Path(name).expanduser()), ["*.json", "*.safetensors"])


def make_draft(
    name: str | None,
    draft_model: Module | None,
    factories: Sequence[PagedCacheFactory],
    *,
    shared_tokens: int = 0,
) -> Draft | None:
    """The draft of this name, None for None.

    Args:
        name: as for `load_draft_model`.
        draft_model: from `load_draft_model`.
        factories: of the model, with the head if it is one, and of the draft model if there is one.
        shared_tokens: `NGramDraft`'s.

    Raises:
        ValueError: the caches of one of the models cannot be rolled back.
    """
    if name is None or (name == AUTO_HEAD and draft_model is None):
        return None
    require_rollback(factories[0].make_cache())
    if draft_model is None:
        return NGramDraft(shared_tokens=shared_tokens)
    if isinstance(draft_model, PredictionHead):
        return HeadDraft(factories[0])
    return ModelDraft(draft_model, factories[1])


def divided_factories(
    models: Sequence[Module], options: CacheOptions, *, dtype: str | None = None
) -> list[PagedCacheFactory]:
    """A factory for each model. They hold the same tokens, so each gets memory in proportion to
    its token's bytes. A prediction head gets none of its own: its layer is one of the first model's
    factory.

    With a `dtype`, such as "float32", the models are converted to it first; weights that are
    quantised keep their bits.
    """
    heads = [each for each in models if isinstance(each, PredictionHead)]
    models = [each for each in models if each not in heads]
    if dtype is not None:
        for model in models:
            model.set_dtype(getattr(mx, dtype))
    if len(models) == 1:
        return [PagedCacheFactory(models[0], options, head=heads[0] if heads else None)]
    tried = [PagedCacheFactory(model, options, store=None) for model in models]
    for factory in tried:
        factory.can_admit(0)  # makes its pool learn the size of a block
    pools = [factory.pool for factory in tried]
    budget = min(pool.budget.max_bytes for pool in pools)
    sizes = [sum(group.block_bytes for group in pool.size.groups) for pool in pools]
    made = [
        PagedCacheFactory(model, options, max_bytes=max(1, budget * size // max(1, sum(sizes))))
        for model, size in zip(models, sizes, strict=True)
    ]
    for factory, measured in zip(made, tried, strict=True):
        factory.prompt_step = measured.prompt_step
    return made
