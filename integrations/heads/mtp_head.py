"""The heads that some models are trained with, for multi-token prediction (MTP).

mlx-lm drops their weights when it loads a model: they are read here, from the model's own files. A
head's layer is one of the model's: its class and its weights' names are those of the model's last
layer, so the model's own `sanitize` brings them into mlx-lm's form.

Which norms and products stand around that layer, and what is fed on to the next token, is as in
vLLM's models (`qwen3_next_mtp.py`, `deepseek_mtp.py`, `mimo_mtp.py`).
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
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.base import create_attention_mask

from paged_kv.integrations.heads.model_parts import ModelParts
from paged_kv.integrations.heads.prediction_head import PredictionHead

Weights = dict[str, mx.array]


@dataclass(frozen=True)
class MtpFamily:
    """How the files of a family of models name the parts of a head.

    Attributes:
        prefix: of all names; `{layers}` stands for the number of the model's layers.
        embedding_norm, hidden_norm, join, norm: the other parts.
        layer: of the weights of the layer, if that has a name of its own.
        shared: parts that are the model's own.
        is_hidden_first: whether hidden states come before embeddings.
        feeds_normed: whether the states that are fed on are those behind the last norm.
        norms_less_one: whether norms multiply by one more than their weights.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str
    layer: str = ""
    shared: tuple[str, ...] = ()
    is_hidden_first: bool = False
    feeds_normed: bool = True
    norms_less_one: bool = False


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


class MtpHead(PredictionHead):
    """A layer of the model's between norms of its own.

    Args:
        family: how it is put together.
        layer: the layer.
        width: of hidden states.
        vocab_size: of the model.
        eps: of the norms.
    """

    def __init__(
        self, family: MtpFamily, layer: Any, width: int, vocab_size: int, eps: float
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden_size, self.vocab_size = width, vocab_size
        self._family = family
        self.embedding_norm, self.hidden_norm, self.norm = (
            RMSNorm(width, eps=eps) for _ in range(3)
        )
        self.join = Linear(2 * width, width, bias=False)
        self.layer = layer

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any = None) -> mx.array:
        both = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        if self._family.is_hidden_first:
            both.reverse()
        joined = self.join(mx.concatenate(both, axis=-1))
        states: mx.array = self.layer(joined, create_attention_mask(joined, cache), cache)
        return self.norm(states) if self._family.feeds_normed else states

    def likeliest(self, states: mx.array, parts: ModelParts) -> mx.array:
        """See `PredictionHead.likeliest`."""
        normed = states if self._family.feeds_normed else self.norm(states)
        return super().likeliest(normed, parts)


def mtp_weights(model: Module, folder: str | Path) -> Weights:
    """The weights of the head that a model was trained with, by their names behind the head's own;
    none if its files have none, or if its family is not known to have a head."""
    family = FAMILIES.get(_file_of(model))
    return {} if family is None else _weights_of(Path(folder), _prefix(family, model))


def load_mtp_head(model: Module, folder: str | Path) -> MtpHead:
    """The head that a model was trained with.

    Args:
        model: a model of mlx-lm.
        folder: the files that it was loaded from.

    Raises:
        ValueError: its family is not known to have a head, the files have none, or weights of it
            are missing; the message says which.
    """
    family = FAMILIES.get(_file_of(model))
    if family is None:
        raise ValueError(
            f"{_file_of(model)} is not known to be trained with a prediction head: those are "
            f"{', '.join(sorted(FAMILIES))}. Name the folder of a head, or another draft"
        )
    parts = ModelParts(model)
    layers = parts.backbone.layers
    weights = mtp_weights(model, folder)
    if not weights:
        raise ValueError(
            f"the files in {folder} hold no weights of a prediction head ("
            f"{_prefix(family, model)}*): conversions often leave them out. Take "
            "the original files, or another draft"
        )
    arguments: Any = parts.arguments
    head = MtpHead(
        family,
        _new_layer(type(layers[-1]), arguments, len(layers) - 1),
        parts.hidden_size,
        parts.vocab_size,
        arguments.rms_norm_eps,
    )
    own, of_layer = _divided(family, weights)
    own |= {f"layer.{each}": array for each, array in _in_form(model, of_layer, layers).items()}
    _quantise(head, own, Path(folder))
    head.load(own, str(folder))
    return head


def _file_of(model: Module) -> str:
    """The name of mlx-lm's file of a model."""
    return type(model).__module__.rpartition(".")[2]


def _prefix(family: MtpFamily, model: Module) -> str:
    return family.prefix.format(layers=len(ModelParts(model).backbone.layers))


def _weights_of(folder: Path, prefix: str) -> Weights:
    """The weights whose names begin with a prefix, without it."""
    found: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded: Any = mx.load(str(path))
        found |= {name: array for name, array in loaded.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): array for name, array in found.items()}


def _quantise(head: MtpHead, weights: Weights, folder: Path) -> None:
    """Quantise the parts of a head whose weights have scales, as the model's config.json says."""
    if any(name.endswith(".scales") for name in weights):
        how = json.loads((folder / "config.json").read_text())["quantization"]
        quantize(
            head,
            how["group_size"],
            how["bits"],
            class_predicate=lambda path, _: f"{path}.scales" in weights,
        )


def _new_layer(kind: Any, arguments: Any, number: int) -> Any:
    """A layer like the model's last one, with weights to be replaced."""
    takes_number = len(signature(kind).parameters) > 1
    return kind(arguments, number) if takes_number else kind(arguments)


def _divided(family: MtpFamily, weights: Weights) -> tuple[Weights, Weights]:
    """The weights of the head's own parts, by their names here, and those of its layer."""
    names = {
        family.embedding_norm: "embedding_norm",
        family.hidden_norm: "hidden_norm",
        family.join: "join",
        family.norm: "norm",
    }
    own: Weights = {}
    of_layer: Weights = {}
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
