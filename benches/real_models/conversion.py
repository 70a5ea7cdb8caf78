"""Makes a folder that mlx-lm loads of a GGUF file, for the architectures llama and gemma3.

Weights are dequantised, which loses nothing in float32 and next to nothing in the 16 bits that they
are written in: those of the model before it was quantised. Names of fields are those of the format
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and of llama.cpp, which writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from benches.real_models.folders import RealModelError
from paged_kv.extras import extra_module

# llama.cpp's types of tokens.
CONTROL, USER_DEFINED = 3, 4

_DTYPES = {"llama": mx.float16, "gemma3": mx.bfloat16}
_OUTER = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}

Object = dict[str, Any]


class Fields:
    """The fields of a GGUF file."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise RealModelError(f"{self._path} has no field {name}: its model is of another kind")
        return self._fields[name].contents()


def convert(gguf: Path, folder: Path) -> None:
    """Write a model's weights, config and tokenizer to a folder.

    Raises:
        RealModelError: the file is no GGUF, or of another architecture.
    """
    library = extra_module("gguf", "real")
    try:
        reader = library.GGUFReader(gguf)
    except (ValueError, IndexError, OverflowError) as error:
        raise RealModelError(f"{gguf} is no GGUF file: {error}") from error
    fields = Fields(gguf, reader.fields)
    architecture = fields["general.architecture"]
    if architecture not in _DTYPES:
        raise RealModelError(
            f"{gguf} holds a model of the architecture {architecture!r}, and only "
            f"{', '.join(_DTYPES)} can be converted"
        )
    weights = _weights(library, reader.tensors, fields, architecture)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = _config(fields, architecture, is_tied="lm_head.weight" not in weights)
    _write(folder / "config.json", config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write(folder / "generation_config.json", {name: config[name] for name in ids})
    _save_tokenizer(folder, fields)


def _write(path: Path, content: Object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _weights(
    library: Any, tensors: Sequence[Any], fields: Fields, architecture: str
) -> dict[str, mx.array]:
    heads = {
        "attn_q": "attention.head_count",
        "attn_k": "attention.head_count_kv",
    }
    weights = {}
    for tensor in tensors:
        stem = tensor.name.split(".")[-2]
        array = np.asarray(library.dequantize(tensor.data, tensor.tensor_type), np.float32)
        array = array.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        if architecture == "llama" and stem in heads:
            array = _in_halves(array, fields[f"llama.{heads[stem]}"])
        if architecture == "gemma3" and stem.endswith("norm"):
            array = array - 1  # llama.cpp folds the 1 in, mlx-lm adds it
        name = _name_in_mlx_lm(tensor.name, architecture)
        weights[name] = mx.array(array).astype(_DTYPES[architecture])
    return weights


def _in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a llama's queries or keys [heads * size, columns] in the order of mlx-lm's rope,
    which rotates halves of a head; llama.cpp's rotates neighbours."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _name_in_mlx_lm(name: str, architecture: str) -> str:
    if name == "output.weight":
        return "lm_head.weight"
    known = {**_OUTER, **_LAYER, **_NORMS[architecture]}
    *layer, stem, end = name.split(".")
    if stem not in known:
        raise RealModelError(
            f"the model has weights {name!r}, which mlx-lm's {architecture} has not"
        )
    return ".".join(["model", *(["layers", layer[1]] if layer else []), known[stem], end])


def _config(fields: Fields, architecture: str, *, is_tied: bool) -> Object:
    def own(name: str) -> Any:
        return fields[f"{architecture}.{name}"]

    heads, hidden = own("attention.head_count"), own("embedding_length")
    size = f"{architecture}.attention.key_length"
    head_dim = fields[size] if size in fields else hidden // heads
    config = {
        "hidden_size": hidden,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": round(own("attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": own("rope.freq_base"),
        "max_position_embeddings": own("context_length"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": is_tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": str(_DTYPES[architecture]).removeprefix("mlx.core."),
    }
    if architecture == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
        } | config
    return (
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
        | config
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": head_dim,
            # GGUF names neither of these two: all Gemma 3 models have them.
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
            "sliding_window": own("attention.sliding_window"),
        }
    )


def _save_tokenizer(folder: Path, fields: Fields) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    special = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    tokenizer = (
        _byte_level_tokenizer(tokens, fields["tokenizer.ggml.merges"])
        if fields["tokenizer.ggml.model"] == "gpt2"
        else _gemma_tokenizer(tokens, fields["tokenizer.ggml.scores"], special)
    )
    for kind, add in (
        (CONTROL, tokenizer.add_special_tokens),
        (USER_DEFINED, tokenizer.add_tokens),
    ):
        names = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        add([AddedToken(name, special=kind == CONTROL, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: Object = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    _write(folder / "tokenizer_config.json", config)


def _byte_level_tokenizer(tokens: Sequence[str], merges: Sequence[str]) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma_tokenizer(
    tokens: Sequence[str], scores: Sequence[float], special: Mapping[str, str]
) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bos = special["bos_token"]
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(vocabulary, scores),
            unk_token=special["unk_token"],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, vocabulary[bos])],
    )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a sentencepiece vocabulary, best score first, as transformers finds them."""
    tokens = list(vocabulary)
    merges: list[tuple[float, int, int, int]] = []
    for token, number in vocabulary.items():
        parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [
            (vocabulary[left], vocabulary[right])
            for left, right in parts
            if left in vocabulary and right in vocabulary
        ]
        merges += sorted((-scores[number], number, *pair) for pair in known)
    merges.sort(key=lambda merge: merge[0])
    return [(tokens[left], tokens[right]) for *_, left, right in merges]
