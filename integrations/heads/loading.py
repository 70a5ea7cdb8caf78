"""Loads prediction heads: from folders with a config.json and a model.safetensors, and those that
some models are trained with, for multi-token prediction (MTP).

mlx-lm drops the weights of the latter when it loads a model: they are read here, from the model's
own files. Such a head's layer is one of the model's: its class and its weights' names are those of
the model's last layer, so the model's own `sanitize` brings them into mlx-lm's form. Which norms
and products stand around that layer, and what is fed on to the next token, is as in vLLM's models
(`qwen3_next_mtp.py`, `deepseek_mtp.py`, `mimo_mtp.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

from paged_kv.integrations.heads.prediction_head import (
    Eagle3Head,
    HeadArgs,
    LayerHead,
    ModelParts,
    PredictionHead,
    llama_head,
)

Weights = dict[str, mx.array]

LAYER_HEAD = "layer_head"
# Tables that checkpoints have and heads do not need: the model's own embeddings, and which of the
# model's tokens the head can draft.
_NOT_NEEDED = frozenset({"embed_tokens.weight", "t2d"})

# What is read of a configuration, as heads were trained with nothing else: what it must have, and
# what it may have.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_NORM_AND_ROPE = ("rms_norm_eps", "rope_theta")
_OF_LAYER_HEAD = (*_SIZES, "num_key_value_heads", "head_dim"), _NORM_AND_ROPE
_OF_EAGLE3 = (
    _SIZES,
    (
        *("num_key_value_heads", "head_dim", *_NORM_AND_ROPE, "rope_scaling"),
        *("max_position_embeddings", "attention_bias", "mlp_bias"),
        *("draft_vocab_size", "target_hidden_size", "norm_before_residual"),
    ),
)


def is_head(folder: Path) -> bool:
    path = folder / "config.json"
    return path.is_file() and _is_known(json.loads(path.read_text()))


def _is_known(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == LAYER_HEAD or "draft_vocab_size" in config


def load_head(folder: str | Path) -> PredictionHead:
    """The head in a folder, one of this package's or of EAGLE-3's.

    Raises:
        OSError: the folder has no config.json or no model.safetensors.
        ValueError: it is no head that is known, or lacks weights; the message says which.
    """
    folder = Path(folder)
    config = json.loads(_required(folder / "config.json").read_text())
    if not _is_known(config):
        raise ValueError(
            f"{folder} is no prediction head that is known: its config.json names neither the "
            f"model_type {LAYER_HEAD!r} nor a draft_vocab_size, as those of EAGLE-3 do"
        )
    is_layer = config.get("model_type") == LAYER_HEAD
    needed, others = _OF_LAYER_HEAD if is_layer else _OF_EAGLE3
    if missing := [name for name in needed if name not in config]:
        raise ValueError(f"config.json of the head in {folder} lacks {', '.join(sorted(missing))}")
    args = HeadArgs(**{name: config[name] for name in (*needed, *others) if name in config})
    head = llama_head(args) if is_layer else Eagle3Head(args)
    loaded: Any = mx.load(str(_required(folder / "model.safetensors")))
    weights = {name: array for name, array in loaded.items() if name not in _NOT_NEEDED}
    head.load(weights, str(folder))
    return head


def _required(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: give a head's folder")
    return path


def load_own_head(model: Module, folder: str | Path) -> PredictionHead | None:
    """The head that comes with a model, which was loaded from `folder`: one in a folder
    `draft_head` beside its files, or one that the model was trained with; None if there is none.

    Raises:
        OSError, ValueError: weights of it are missing; the message says which.
    """
    beside = Path(folder) / "draft_head"
    return load_head(beside) if beside.is_dir() else _mtp_head(model, Path(folder))


@dataclass(frozen=True)
class MtpFamily:
    """How the files of a family of models name the parts of a head."""

    prefix: str  # of all names; `{layers}` stands for the number of the model's layers
    # The parts of `LayerHead` that have names of their own.
    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str
    layer: str = ""  # of the weights of the layer, if that has a name of its own
    shared: tuple[str, ...] = ()  # parts that are the model's own
    # As in `LayerHead`.
    is_hidden_first: bool = False
    feeds_normed: bool = True
    norms_less_one: bool = False  # whether norms multiply by one more than their weights

    def head(self, layer: Any, hidden_size: int, vocab_size: int, eps: float) -> LayerHead:
        """A head that is put together so: see `LayerHead`."""
        order = {"is_hidden_first": self.is_hidden_first, "feeds_normed": self.feeds_normed}
        return LayerHead(layer, hidden_size, vocab_size, eps, **order)


_QWEN = MtpFamily(
    "mtp.",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    "layers.0.",
    shared=("embed_tokens.", "lm_head."),
    norms_less_one=True,
)
_DEEPSEEK = MtpFamily(
    "model.layers.{layers}.",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    shared=("embed_tokens.", "shared_head.head."),
    feeds_normed=False,
)
_MIMO = MtpFamily(
    "model.mtp_layers.0.",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    is_hidden_first=True,
)
FAMILIES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _DEEPSEEK),
    "mimo": _MIMO,
}


def _mtp_head(model: Module, folder: Path) -> LayerHead | None:
    """The head that a model was trained with; None if its files hold no weights of one, or if its
    family is not known to have one."""
    family = FAMILIES.get(type(model).__module__.rpartition(".")[2])
    if family is None:
        return None
    parts = ModelParts(model)
    prefix = family.prefix.format(layers=len(parts.backbone.layers))
    weights = Weights()
    for path in sorted(folder.glob("*.safetensors")):
        loaded: Any = mx.load(str(path))
        names = (name for name in loaded if name.startswith(prefix))
        weights |= {name.removeprefix(prefix): loaded[name] for name in names}
    if not weights:
        return None
    arguments, layers = parts.arguments, parts.backbone.layers
    kind: Any = type(layers[-1])
    takes_number = len(signature(kind).parameters) > 1
    layer = kind(arguments, len(layers) - 1) if takes_number else kind(arguments)
    head = family.head(layer, parts.hidden_size, parts.vocab_size, arguments.rms_norm_eps)
    own, of_layer = _divided(family, weights)
    own |= {f"layer.{each}": array for each, array in _in_form(model, of_layer, layers).items()}
    _quantise(head, own, folder)
    head.load(own, str(folder))
    return head


def _quantise(head: LayerHead, weights: Weights, folder: Path) -> None:
    """Quantise the parts of a head whose weights have scales, as the model's config.json says."""
    if any(name.endswith(".scales") for name in weights):
        how = json.loads((folder / "config.json").read_text())["quantization"]
        quantize(
            head,
            how["group_size"],
            how["bits"],
            class_predicate=lambda path, _: f"{path}.scales" in weights,
        )


def _divided(family: MtpFamily, weights: Weights) -> tuple[Weights, Weights]:
    """The weights of the head's own parts, by their names here, and those of its layer."""
    names = {
        getattr(family, name): name for name in ("embedding_norm", "hidden_norm", "join", "norm")
    }
    own, of_layer = Weights(), Weights()
    for name, array in weights.items():
        weight = array + 1 if family.norms_less_one and "norm" in name else array
        part, _, kind = name.rpartition(".")
        if part in names:
            own[f"{names[part]}.{kind}"] = weight
        elif not name.startswith(family.shared):
            of_layer[name.removeprefix(family.layer)] = weight
    return own, of_layer


def _in_form(model: Any, weights: Weights, layers: Any) -> Weights:
    """The weights of a layer in the form that mlx-lm's layers have. Norms are so already."""
    name = f"model.layers.{len(layers) - 1}."
    norms = {each: array for each, array in weights.items() if array.ndim == 1}
    others = {name + each: array for each, array in weights.items() if each not in norms}
    sanitized: Mapping[str, mx.array] = model.sanitize(others)
    at = name.removeprefix("model.")
    return norms | {each.partition(at)[2]: array for each, array in sanitized.items()}
