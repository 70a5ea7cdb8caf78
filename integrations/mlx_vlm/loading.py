"""Loads models with mlx-vlm for the commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from mlx_lm.utils import load_tokenizer
from mlx_vlm import models
from mlx_vlm.utils import get_model_type, load

from paged_kv.integrations.mlx_vlm.prompt_maker import PromptMaker
from paged_kv.integrations.mlx_vlm.text_model import TextModel


@dataclass(frozen=True)
class Loaded:
    """A model of mlx-vlm, with mlx-lm's tokenizer of it, and what makes its prompts."""

    model: TextModel
    tokenizer: Any
    prompts: PromptMaker


def knows(config: dict[str, Any]) -> bool:
    """Whether mlx-vlm has a model of the type that a config names."""
    return get_model_type(dict(config)) in {each.name for each in iter_modules(models.__path__)}


def load_model(
    folder: Path,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    lazy: bool = False,
) -> Loaded:
    """Load a model and its processor.

    Raises:
        ValueError, OSError: mlx-vlm cannot, or the model makes no text; others may be raised too.
    """
    whole, processor = load(str(folder), lazy=lazy, trust_remote_code=trust_remote_code)
    if not hasattr(whole, "language_model"):
        raise ValueError(f"mlx-vlm's model in {folder} makes no text: it has no language model")
    stops = getattr(processor, "tokenizer", processor).stopping_criteria.eos_token_ids
    template = getattr(processor, "chat_template", None)
    own = {"chat_template": template} if isinstance(template, str) else {}
    tokenizer = load_tokenizer(folder, own | (tokenizer_config or {}), eos_token_ids=list(stops))
    model = TextModel(whole)
    return Loaded(model, tokenizer, PromptMaker(model, processor, tokenizer))
