"""Generates for `paged-kv generate --image`: makes a prompt of texts and images with mlx-vlm's
message formats and processor, and a text about them."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_tokenizer
from mlx_vlm import models
from mlx_vlm.prompt_utils import apply_chat_template, get_chat_template
from mlx_vlm.utils import (
    get_model_type,
    load,
    load_image,
    prepare_inputs,
    should_add_special_tokens,
)
from PIL import Image

from paged_kv.integrations.generation.text_generation import TextGeneration, loaded
from paged_kv.integrations.media_keys import MediaKeys
from paged_kv.integrations.mlx_lm_internals import downloaded
from paged_kv.integrations.mlx_vlm.text_model import MediaPrompt, TextModel

# Of all images of a prompt. A camera's largest has so many; every processor scales them down.
MOST_PIXELS = 100_000_000

# What configs and processors of mlx-vlm call the tokens that stand for images, sounds and videos.
_MARK_ID = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa)(_[a-z]+)?_token_(id|index)")
_MARK_NAMES = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token")


class PromptMaker:
    """Makes the prompts of one model. Threads may share it.

    Args:
        model: the model.
        processor: mlx-vlm's.
        tokenizer: mlx-lm's, whose chat template is used.

    Attributes:
        marks: the texts of the tokens that stand for images, sounds and videos, by their ids.
    """

    def __init__(self, model: TextModel, processor: Any, tokenizer: Any) -> None:
        self._config = model.whole.config
        self._processor = processor
        self._tokenizer = tokenizer
        self._keys = MediaKeys(model.whole, processor)
        self.marks = _marks(self._config, processor, tokenizer)
        # A processor's tokenizer changes its settings at every use.
        self._lock = threading.Lock()

    def chat(
        self, messages: Sequence[dict[str, Any]], files: Sequence[bytes | str], **template: Any
    ) -> MediaPrompt:
        """The prompt of a conversation.

        Args:
            messages: in OpenAI's form; each image part stands for the next of `files`.
            files: the contents of image files, or their paths or addresses.
            template: variables of the chat template.

        Raises:
            ValueError: the processor or the template cannot take them; others may be raised too.
        """
        formatted = apply_chat_template(
            self._processor,
            self._config,
            list(messages),
            return_messages=True,
            num_images=len(files),
        )
        return self.text(self._rendered(formatted, template), files)

    def text(self, text: str, files: Sequence[bytes | str]) -> MediaPrompt:
        """The prompt of a text in which the model's own marks stand for images.

        Raises:
            ValueError: the processor cannot take it; others may be raised too.
        """
        images = _opened_all(files)
        with self._lock:
            inputs: dict[str, Any] = dict(
                prepare_inputs(
                    self._processor,
                    images=images or None,
                    prompts=text,
                    image_token_index=getattr(self._config, "image_token_index", None),
                    add_special_tokens=should_add_special_tokens(
                        self._config.model_type, self._processor
                    ),
                )
            )
        tokens: list[int] = inputs.pop("input_ids").flatten().tolist()
        pixel_values, mask = inputs.pop("pixel_values", None), inputs.pop("attention_mask", None)
        # Here: the thread that uses them cannot. See `ThreadConflict`.
        leaves: Any = tree_flatten([pixel_values, mask, inputs])
        mx.eval([leaf for _, leaf in leaves if isinstance(leaf, mx.array)])
        return MediaPrompt(
            tokens,
            self._keys.keyed(tokens, {"images": images}) if images else tokens,
            pixel_values,
            mask,
            inputs,
        )

    def tokens(self, tokens: list[int]) -> MediaPrompt:
        """The prompt of these tokens of text."""
        return MediaPrompt(tokens, tokens)

    def _rendered(self, formatted: list[Any], template: dict[str, Any]) -> str:
        if isinstance(formatted[-1], str):
            # Of models that read only the last message, and have no template.
            return formatted[-1]
        if self._tokenizer.has_chat_template:
            rendered = self._tokenizer.apply_chat_template(
                formatted, tokenize=False, add_generation_prompt=True, **template
            )
        else:
            rendered = get_chat_template(self._processor, formatted, add_generation_prompt=True)
        return str(rendered)


def _marks(config: Any, processor: Any, tokenizer: Any) -> dict[int, str]:
    named = {each for name, each in vars(config).items() if _MARK_ID.fullmatch(name)}
    marks = {each: tokenizer.convert_ids_to_tokens(each) for each in named if _is_id(each)}
    for name in _MARK_NAMES:
        text = getattr(processor, name, None)
        if isinstance(text, str) and _is_id(token := tokenizer.convert_tokens_to_ids(text)):
            marks[token] = text
    # A default of a config may be the id of a word.
    added = tokenizer.added_tokens_decoder
    return {token: text for token, text in marks.items() if token in added}


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _opened_all(files: Sequence[bytes | str]) -> list[Any]:
    """The images of Pillow in files, given as for `PromptMaker.chat`.

    Raises:
        ValueError: one is none that Pillow reads, or all have too many pixels. A small file can
            take gigabytes of memory.
    """
    images, pixels = [], 0
    for file in files:
        image = _opened(file, MOST_PIXELS - pixels)
        pixels += image.width * image.height
        images.append(image)
    return images


def _opened(file: bytes | str, most_pixels: int) -> Any:
    if isinstance(file, str):
        return load_image(file)
    try:
        width, height = Image.open(BytesIO(file)).size
        if width * height > most_pixels:
            raise ValueError(
                f"it has {width:,} x {height:,} pixels, and {MOST_PIXELS:,} are read of all images "
                "of a prompt"
            )
        return load_image(BytesIO(file))
    except Exception as error:  # Pillow's readers raise many types
        raise ValueError(f"an image of {len(file):,} bytes cannot be read: {error}") from error


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
    """A model of mlx-vlm on paged caches, and how it samples."""

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

        def load_both(path_or_repo: str) -> tuple[Any, Any]:
            found = load_model(downloaded(path_or_repo))
            self._prompts = found.prompts
            return found.model, found.tokenizer

        return loaded(path_or_repo, load_both)
