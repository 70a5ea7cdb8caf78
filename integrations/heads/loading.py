"""Loads prediction heads from folders: a config.json and a model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from paged_kv.integrations.heads.eagle3_head import Eagle3Args, Eagle3Head
from paged_kv.integrations.heads.mtp_head import load_mtp_head, mtp_weights
from paged_kv.integrations.heads.prediction_head import LayerHead, LayerHeadArgs, PredictionHead

LAYER_HEAD = "layer_head"
# Tables that checkpoints have and heads do not need: the model's own embeddings, and which of the
# model's tokens the head can draft.
_NOT_NEEDED = frozenset({"embed_tokens.weight", "t2d"})


def is_head(folder: Path) -> bool:
    """Whether a folder's config.json is one of a head that is known."""
    path = folder / "config.json"
    return path.is_file() and _kind_of(json.loads(path.read_text())) is not None


def load_head(folder: str | Path) -> PredictionHead:
    """The head in a folder, one of this package's or of EAGLE-3's.

    Raises:
        OSError: the folder has no config.json or no model.safetensors.
        ValueError: it is no head that is known, or lacks weights; the message says which.
    """
    folder = Path(folder)
    config = json.loads(_required(folder / "config.json").read_text())
    head = _new_head(folder, config)
    loaded: Any = mx.load(str(_required(folder / "model.safetensors")))
    weights = {name: array for name, array in loaded.items() if name not in _NOT_NEEDED}
    head.load(weights, str(folder))
    return head


def has_own_head(model: Module, folder: str | Path) -> bool:
    """Whether a head comes with a model, as `load_own_head` finds it."""
    return (Path(folder) / "draft_head").is_dir() or bool(mtp_weights(model, folder))


def load_own_head(model: Module, folder: str | Path) -> PredictionHead:
    """The head that comes with a model: in a folder `draft_head` beside its files, or one that the
    model was trained with.

    Args:
        model: a model of mlx-lm.
        folder: the files that it was loaded from.

    Raises:
        ValueError: there is none, or weights of it are missing; the message says which.
    """
    beside = Path(folder) / "draft_head"
    return load_head(beside) if beside.is_dir() else load_mtp_head(model, folder)


def _required(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: give a head's folder")
    return path


def _kind_of(config: Mapping[str, Any]) -> tuple[type[Any], type[Any]] | None:
    """The class of a head, and that of its arguments; None if this is none."""
    if config.get("model_type") == LAYER_HEAD:
        return LayerHead, LayerHeadArgs
    return (Eagle3Head, Eagle3Args) if "draft_vocab_size" in config else None


def _new_head(folder: Path, config: Mapping[str, Any]) -> PredictionHead:
    kind = _kind_of(config)
    if kind is None:
        raise ValueError(
            f"{folder} is no prediction head that is known: its config.json names neither the "
            f"model_type {LAYER_HEAD!r} nor a draft_vocab_size, as those of EAGLE-3 do"
        )
    head_class, arguments = kind
    head: PredictionHead = head_class(arguments(**_known(arguments, folder, config)))
    return head


def _known(kind: type[Any], folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a class that a config has."""
    found = {each.name: config[each.name] for each in fields(kind) if each.name in config}
    needed = [each for each in kind.__annotations__ if each not in found and each not in vars(kind)]
    if needed:
        raise ValueError(f"config.json of the head in {folder} lacks {', '.join(needed)}")
    return found
