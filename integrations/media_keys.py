"""Makes images and sounds part of the keys under which prompts are cached.

A processor puts the same token ids into a prompt for every image of one size, so the ids alone do
not tell two images apart. As mlx-lm's server does, each of these tokens is replaced by a negative
id, which no tokenizer has. Here it is made of a SHAKE-256 hash of the content and of the
processor's settings, 63 bits for each token. Prompts then share the text before an image, and what
follows it only if the images are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

import mlx.core as mx
import numpy as np

from paged_kv.checks import TokenIds, counted, described, token_ids


class Media(TypedDict, total=False):
    """What a prompt has besides text, in the prompt's order: arrays, images of Pillow, bytes, or
    paths of local files."""

    images: Sequence[Any]
    audio: Sequence[Any]
    videos: Sequence[Any]


# What the tokens of each are called in mlx-vlm's configs.
_KINDS = {"images": "image", "audio": "audio", "videos": "video"}


class MediaKeys:
    """Replaces the tokens of images, sounds and videos in prompts of one model.

    Args:
        model: a model of mlx-vlm as a whole, whose config names the tokens; others have none.
        processor: what prepares the model's images. Its settings are part of every id.
    """

    def __init__(self, model: Any, processor: Any = None) -> None:
        config = getattr(model, "config", None)
        self._tokens: dict[str, int] = {}
        for kind in _KINDS.values():
            # Configs of mlx-vlm have one of these names for the id of a kind's tokens.
            named = (getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index"))
            if (token := next((each for each in named if isinstance(each, int)), None)) is not None:
                self._tokens[kind] = token
        self._settings = _settings_of(processor)

    def keyed(self, tokens: TokenIds, media: Media) -> list[int]:
        """Token ids with the ids of media in the place of their tokens.

        Args:
            tokens: the prompt as the processor made it.
            media: what the tokens stand for.

        Raises:
            TypeError: `tokens` are not token ids, or an item is none of these.
            ValueError: the prompt has tokens of a kind of which nothing was given, or the reverse.
            OSError: a file cannot be read.
        """
        ids = token_ids(tokens)
        items: dict[str, Any] = {**media}
        if unknown := items.keys() - _KINDS.keys():
            raise TypeError(f"media are {', '.join(_KINDS)}, got {', '.join(sorted(unknown))}")
        for name, kind in _KINDS.items():
            given, token = list(items.get(name) or []), self._tokens.get(kind)
            places = [] if token is None else [at for at, each in enumerate(ids) if each == token]
            if bool(given) != bool(places):
                raise ValueError(
                    f"the prompt has {counted(len(places), f'{kind} token')} (id {token}), and was "
                    f"given {counted(len(given), f'{kind} item')}: give what the tokens stand for, "
                    "and make the factory with the whole model of mlx-vlm, whose config names them"
                )
            if places:
                digests = []
                for each in given:
                    digest = hashlib.sha256(f"{kind} {self._settings}".encode())
                    for part in _content(kind, each):
                        digest.update(len(part).to_bytes(8, "little") + part)
                    digests.append(digest.digest())
                _replace(ids, places, digests)
        return ids


def _settings_of(processor: Any) -> str:
    """The settings of a processor's parts, as a text that is equal for equal settings."""
    parts = (getattr(processor, name, None) for name in ("image_processor", "feature_extractor"))
    settings = [
        part.to_dict() if hasattr(part, "to_dict") else vars(part)
        for part in parts
        if part is not None
    ]
    return json.dumps(settings, sort_keys=True, default=str)


def _content(kind: str, item: Any) -> tuple[bytes, ...]:
    """What tells an item apart from others."""
    if isinstance(item, bytes):
        return (b"bytes", item)
    if isinstance(item, str | os.PathLike):
        return (b"bytes", Path(item).read_bytes())
    if isinstance(item, mx.array):
        item = np.array(item.astype(mx.float32) if item.dtype == mx.bfloat16 else item)
    if isinstance(item, np.ndarray):
        return (f"{item.dtype} {item.shape}".encode(), np.ascontiguousarray(item).tobytes())
    if hasattr(item, "tobytes") and hasattr(item, "mode"):
        return (f"{item.mode} {item.size}".encode(), item.tobytes())
    raise TypeError(
        f"{kind} must be an array, an image of Pillow, bytes or the path of a local file, got "
        f"{described(item)}: load what is elsewhere first"
    )


def _replace(ids: list[int], places: list[int], digests: list[bytes]) -> None:
    """Replace the tokens at each run of places by ids of its item.

    Some processors cut one image into several runs. Where runs and items do not pair up, every run
    stands for all items: nothing wrong is shared, and less of what could be.
    """
    runs = np.split(np.array(places), np.flatnonzero(np.diff(places) > 1) + 1)
    if len(runs) != len(digests):
        runs, digests = [np.array(places)], [b"".join(digests)]
    for run, digest in zip(runs, digests, strict=True):
        stream = hashlib.shake_256(digest).digest(8 * len(run))
        for place, number in zip(run, np.frombuffer(stream, "<u8"), strict=True):
            ids[place] = -1 - int(number >> 1)


class PromptSteps(Protocol):
    """A model's steps for one prompt with images and the tokens after it, instead of the model's
    own: takes tokens [1, T], which continue those of the step before, and the prompt cache;
    returns logits [1, _, vocabulary], the last of them those of the last token.

    Attributes:
        start: the tokens of the prompt that the prompt cache has to hold before the first step:
            those that were found, or 0 if the model cannot continue behind them.
        in_parts: whether each step computes its own tokens, and not the first one all of the
            prompt.
    """

    start: int
    in_parts: bool

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array: ...


class PromptMedia(Protocol):
    """The images of a prompt."""

    @property
    def cache_key(self) -> list[int]:
        """The prompt's tokens; those of images differ by the image's content."""

    def begin(self, model: Any, cached: int) -> PromptSteps:
        """The model's steps behind a cached prefix of `cached` tokens.

        Raises:
            ValueError: the model cannot read the images.
        """
