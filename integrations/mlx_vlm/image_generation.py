"""Generates for `paged-kv generate --image`: a text about images, with a model of mlx-vlm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from mlx_lm.utils import _download, load_tokenizer
from mlx_vlm import models
from mlx_vlm.utils import get_model_type, load

from paged_kv.integrations.generation.text_generation import TextGeneration, loaded
from paged_kv.integrations.mlx_vlm.media_prompt import MediaPrompt
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


class ImageGeneration(TextGeneration):
    """A model of mlx-vlm on paged caches, with its sampling options."""

    _prompts: PromptMaker

    def read(self, prompt: str, images: Sequence[str], *, use_template: bool) -> MediaPrompt:
        """The prompt about images, as mlx-vlm makes it.

        Args:
            prompt: a text. Without the template, it has the model's marks of images itself.
            images: their files or addresses.

        Raises:
            ValueError, OSError: an image or the prompt cannot be read.
        """
        if not use_template:
            return self._prompts.text(prompt, images)
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
        return self._prompts.chat([{"role": "user", "content": parts}], images)

    def _loaded(self, path_or_repo: str) -> tuple[Any, Any]:
        if self._ranks.size > 1:
            raise ValueError(
                "--image does not work with several processes for one model: generate without "
                "mlx.launch"
            )
        return loaded(path_or_repo, self._load)

    def _load(self, path_or_repo: str) -> tuple[Any, Any]:
        found = load_model(_download(path_or_repo))
        self._prompts = found.prompts
        return found.model, found.tokenizer
