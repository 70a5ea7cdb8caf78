"""Small random language models of mlx-vlm's model folders.

A folder's `TextConfig` is filled with small numbers wherever it has a field of that name, so new
folders need no entry here. A folder whose numbers must fit each other has its own in ``OWN``.
"""

import ast
import importlib
import inspect
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

IMAGE = 97
"""The id of the image tokens of `whole_model`."""

SMALL: dict[str, Any] = {
    "model_type": "small",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    # Of experts.
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    # Of linear attention.
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "intermediate_size": [64] * 4,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "sliding_window_pattern": 2,
    },
    "gemma4": {
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
    },
    "glm4v_moe": {
        "use_qk_norm": False,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 4]},
        "rope_parameters": {"type": "mrope", "mrope_section": [2, 2, 4]},
    },
    # Their indexers choose fewer tokens than prompts have.
    "glm5_next": {
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"] * 2,
        "indexer_types": ["full", "full", "full", "shared"],
        "index_topk": 32,
        "index_kpool": 4,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "minimax_m3_vl": {
        "num_local_experts": 4,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 32,
            "sparse_num_index_heads": 2,
            "sparse_topk_blocks": 4,
            "sparse_block_size": 8,
            "sparse_disable_index_value": [0, 0, 1, 1],
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 0, 1, 1],
        },
    },
    "qwen4_exp": {
        "indexer_budget": 32,
        "indexer_head_dim": 16,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "eos_token_id": 1,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [2, 1, 1],
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "mimo_v2": {"moe_layer_freq": [0] * 4, "hybrid_layer_pattern": [1, 0] * 2},
    "moondream3": {"num_key_value_heads": 4},
    "llama4": {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "llama"},
    "llmjpvl": {"model_type": "llama"},
    "multi_modality": {"model_type": "llama"},
    "plamo2vl": {"model_type": "plamo2"},
    "lfm2_vl": {"full_attn_idxs": [1, 3], "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 64},
    "step3p7": {"num_attention_groups": 2},
    "paligemma": {"model_type": "gemma", "query_pre_attn_scalar": 32},
    "aya_vision": {"head_dim": 16},
    "ernie4_5_moe_vl": {"head_dim": 16, "mrope_section": [2, 2, 4]},
    "qwen2_vl": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "head_dim": 16},
    "qwen2_5_vl": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "qwen3_vl": {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
}


def folders() -> list[str]:
    """The folders of mlx-vlm's models that have a language model beside a vision model."""
    package = importlib.import_module("mlx_vlm.models")
    (path,) = map(Path, package.__path__)
    return sorted(
        folder.name
        for folder in path.iterdir()
        if (folder / "language.py").exists()
        and {"TextConfig", "VisionConfig"} <= set(_classes(folder / "config.py"))
    )


def small_language_model(folder: str, *, seed: int = 0) -> Module:
    """The folder's `LanguageModel`, in float32, with weights that depend on `seed` alone.

    Raises whatever the folder raises if it needs more than this module knows.
    """
    mx.random.seed(seed)
    config = importlib.import_module(f"mlx_vlm.models.{folder}.config")
    language = importlib.import_module(f"mlx_vlm.models.{folder}.language")
    text = config.TextConfig(**_small(config.TextConfig, OWN.get(folder, {})))
    vision = getattr(config, "VisionConfig", None)
    whole = SimpleNamespace(
        **_defaults(config.ModelConfig), text_config=text, vision_config=_defaults_of(vision)
    )
    takes = list(inspect.signature(language.LanguageModel).parameters)
    model = language.LanguageModel(*[text, whole][: len(takes)])
    model.update(tree_map(drawn, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return cast(Module, model)


def _classes(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
    return [each.name for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]


def whole_model() -> Any:
    """A model of mlx-vlm as a whole, but for what makes features of images."""
    text = small_language_model("idefics3")
    kind = type("Model", (Module,), {"__module__": "mlx_vlm.models.idefics3.idefics3"})
    whole = kind()
    whole.language_model = text
    whole.config = SimpleNamespace(image_token_index=IMAGE)
    return whole


def _small(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    names = {field.name: field for field in fields(config)}
    chosen = {name: value for name, value in {**SMALL, **own}.items() if name in names}
    missing = [
        name
        for name, field in names.items()
        if field.default is MISSING and field.default_factory is MISSING and name not in chosen
    ]
    if missing:
        raise ValueError(f"no small value for {', '.join(missing)}")
    return chosen


def _defaults_of(config: Any) -> SimpleNamespace:
    return SimpleNamespace(**_defaults(config) if is_dataclass(config) else {})


def _defaults(config: Any) -> dict[str, Any]:
    """The defaults of a config, such as ids of image tokens, which are outside the vocabulary."""
    own = ("text_config", "vision_config")
    return {
        field.name: field.default
        for field in fields(config)
        if field.default is not MISSING and field.name not in own
    }


def drawn(parameter: mx.array) -> mx.array:
    """Random numbers that let attention change the logits, as in tests/support/zoo.py."""
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    noise = mx.random.normal(parameter.shape)
    return 0.2 * noise if parameter.ndim > 1 else parameter.astype(mx.float32) + 0.1 * noise
