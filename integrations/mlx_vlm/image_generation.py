"""Generates for `paged-kv generate --image`: a text about images, with a model of mlx-vlm."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.utils import _download

from paged_kv.integrations.generation.text_generation import TextGeneration, loaded
from paged_kv.integrations.mlx_vlm.loading import load_model
from paged_kv.integrations.mlx_vlm.media_prompt import MediaPrompt
from paged_kv.integrations.mlx_vlm.prompt_maker import PromptMaker


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
