"""Lets mlx-lm's generators run a model of mlx-vlm, makes a prompt of texts and images with
mlx-vlm's message formats and processor, and computes it as mlx-vlm does: with the embeddings and
positions of its images. `ImageGeneration` does so for `paged-kv generate --image`."""

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
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import load_tokenizer
from mlx_vlm import models
from mlx_vlm.generate.common import _chunked_prefill_enabled
from mlx_vlm.generate.dispatch import _prime_cached_prefix_rope_state
from mlx_vlm.prompt_utils import apply_chat_template, get_chat_template
from mlx_vlm.utils import (
    get_model_type,
    load,
    load_image,
    prepare_inputs,
    should_add_special_tokens,
)
from PIL import Image

from paged_kv.integrations.batching.prompt_caches import leaves
from paged_kv.integrations.cache_library import model_file
from paged_kv.integrations.generation.text_generation import TextGeneration, loaded
from paged_kv.integrations.media_keys import MediaKeys
from paged_kv.integrations.mlx_lm_internals import downloaded
from paged_kv.integrations.mlx_vlm.hooks import stock_make_prompt_cache
from paged_kv.integrations.model_trial import NOTED_POSITIONS
from paged_kv.integrations.states.one_by_one import alone

# Of all images of a prompt. A camera's largest has so many; every processor scales them down.
MOST_PIXELS = 100_000_000

# What configs and processors of mlx-vlm call the tokens that stand for images, sounds and videos.
_MARK_ID = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa)(_[a-z]+)?_token_(id|index)")
_MARK_NAMES = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token")

# Folders of mlx-vlm whose rows come out wrong in a batch padded on the right: their layers count
# columns, or attend to later tokens. For the others that are named here, no small model has shown
# that they are right. `benches/vision_families.py` tries all.
_WRONG_IN_BATCHES = frozenset({"falcon_perception", "inkling", "mllama", "zaya1_vl"})
_NOT_TRIED = frozenset(
    {
        *("glm4v_moe", "hunyuan_vl", "jina_vlm", "kimi_k3", "mimo_v2", "molmo"),
        *("moondream3", "muse_spark", "nemotron_parse", "phi3_v", "phi4mm", "qwen3_omni_moe"),
    }
)


class TextModel(Module):
    """A model of mlx-vlm, called as mlx-lm's models are: with tokens and a prompt cache.

    Args:
        whole: the model as `mlx_vlm.load` returns it.

    Attributes:
        is_batchable: whether rows of texts can be a batch, and continue behind cached prefixes.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # MLX's
        self.whole = whole
        is_known = model_file(whole) not in _WRONG_IN_BATCHES | _NOT_TRIED
        can_merge = all(hasattr(each, "merge") for each in self.make_cache())
        self.is_batchable = is_known and can_merge and self.reads_in_parts(mx.array([[0, 0]]), {})

    @property
    def decoder(self) -> Any:
        """The part that has the caches and makes logits."""
        return self.whole.language_model

    @property
    def layers(self) -> list[Any]:
        found: list[Any] = self.decoder.layers
        return found

    def make_cache(self) -> list[Any]:
        return stock_make_prompt_cache(self.decoder)

    def reads_in_parts(self, tokens: mx.array, inputs: dict[str, Any]) -> bool:
        """Whether a prompt may be computed in several steps: not if its images, or its texts,
        attend to later tokens.

        Args:
            tokens: the prompt, integers [1, T].
            inputs: what the processor made besides.
        """
        return bool(_chunked_prefill_enabled(self.whole, input_ids=tokens, prefill_kwargs=inputs))

    def positions(self) -> dict[str, Any]:
        """What the decoder has noted about the positions of its latest prompt."""
        noted = [name for name in NOTED_POSITIONS if hasattr(self.decoder, name)]
        return {name: getattr(self.decoder, name) for name in noted}

    def set_positions(self, noted: dict[str, Any]) -> None:
        """Let the decoder continue a prompt that it noted this about."""
        for name in self.positions():
            setattr(self.decoder, name, noted.get(name))

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """The logits [B, T, vocabulary] of texts [B, T].

        A token's position is the number of tokens before it, whatever prompt came before.
        """
        for each in leaves(cache or []):
            # mlx-lm pads prompts of a batch on the right, and tells their lengths. mlx-vlm's
            # recurrent layers do not look at the lengths in a new batch, which has a left padding
            # of 0.
            if getattr(each, "lengths", None) is not None and hasattr(each, "left_padding"):
                each.left_padding = None
        self.set_positions({"_rope_deltas": mx.zeros((inputs.shape[0], 1), mx.int32)})
        logits: mx.array = self.decoder(inputs, cache=cache).logits
        return logits


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt as mlx-vlm's processor made it.

    Attributes:
        tokens: their ids.
        cache_key: the same, with ids made of the content in the place of each image's tokens.
        pixel_values: of all images; None for a text.
        mask: which tokens count [1, T]; None for all.
        inputs: what else the model needs, such as the images' sizes in patches.
    """

    tokens: list[int]
    cache_key: list[int]
    pixel_values: Any = None
    mask: mx.array | None = None
    inputs: dict[str, Any] | None = None

    @property
    def media_end(self) -> int:
        """The number of tokens up to the last one of an image; 0 for a text."""
        return max((at for at, each in enumerate(self.cache_key, 1) if each < 0), default=0)

    def begin(self, model: TextModel, cached: int) -> PromptSteps:
        """See `PromptMedia`."""
        return PromptSteps(model, self, cached)


class PromptSteps:
    """See `media_keys.PromptSteps`; called as mlx-lm calls a model."""

    def __init__(self, model: TextModel, prompt: MediaPrompt, cached: int) -> None:
        self._model = model
        self._tokens = mx.array([prompt.tokens])
        inputs = dict(prompt.inputs or {})
        self.in_parts = model.reads_in_parts(self._tokens, inputs)
        self.start = self._done = cached if self.in_parts and model.is_batchable else 0
        # Of the tokens that are not computed yet; None where the decoder looks them up itself.
        self._embeddings: mx.array | None = None
        self._arguments: dict[str, Any] = {}
        self._output: Any = None
        model.set_positions({})
        # Text behind all images is computed as generated tokens are, once its positions are known.
        is_text = self.start > 0 and prompt.media_end <= self.start
        whole, tokens = model.whole, self._tokens
        if not (is_text and _prime_cached_prefix_rope_state(whole, tokens, prompt.mask, inputs)):
            self._embed(prompt, inputs)
        self._positions = model.positions()

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """The logits [1, 1, vocabulary] of the last of the tokens [1, T], which continue those of
        the step before."""
        self._model.set_positions(self._positions)
        start, self._done = self._done, self._done + inputs.shape[1]
        if self._embeddings is None:
            logits = self._finish(self._compute(inputs, cache))
        elif self.in_parts:
            logits = self._read(start, inputs, cache)
        else:
            # The first part computes all of the prompt. The last part finds it computed.
            if self._output is None:
                self._output = self._compute(self._tokens, cache, inputs_embeds=self._embeddings)
            is_last = self._done >= self._tokens.shape[1]
            logits = self._finish(self._output) if is_last else _last_logits(self._output)
        self._positions = self._model.positions()
        return logits

    def _embed(self, prompt: MediaPrompt, inputs: dict[str, Any]) -> None:
        """Compute the embeddings of all tokens, and what else the decoder needs."""
        made = self._model.whole.get_input_embeddings(
            self._tokens, prompt.pixel_values, mask=prompt.mask, **inputs
        ).to_dict()
        embeddings: mx.array = made.pop("inputs_embeds")
        if embeddings.shape[1] != len(prompt.tokens):
            raise ValueError(
                f"this model makes {embeddings.shape[1]:,} embeddings of a prompt of "
                f"{len(prompt.tokens):,} tokens, and pages are counted in tokens"
            )
        self._arguments = inputs | {name: each for name, each in made.items() if each is not None}
        mx.eval(embeddings)
        self._embeddings = embeddings

    def _read(self, start: int, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Compute the prompt's next part. The decoder cuts its other arguments itself."""
        assert self._embeddings is not None, "the prompt is not computed yet"
        part = self._embeddings[:, start : self._done]
        if self._done >= self._tokens.shape[1]:
            return self._finish(self._compute(inputs, cache, inputs_embeds=part))
        output = self._compute(inputs, cache, inputs_embeds=part, n_to_process=inputs.shape[1])
        return _last_logits(output)

    def _compute(self, inputs: mx.array, cache: list[Any], **more: Any) -> Any:
        decoder = self._model.decoder
        with alone(cache) as caches:
            return decoder(inputs, cache=caches, logits_to_keep=1, **self._arguments, **more)

    def _finish(self, output: Any) -> mx.array:
        """The logits of a step that a generated token follows, which gets what mlx-vlm's
        `generate_step` hands to it."""
        self._embeddings = self._output = None
        handed = ("cross_attention_states", "encoder_outputs")
        states = {name: getattr(output, name, None) for name in handed}
        self._arguments = {name: each for name, each in states.items() if each is not None}
        return _last_logits(output)


def _last_logits(output: Any) -> mx.array:
    logits: mx.array = output.logits[:, -1:]
    return logits


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
