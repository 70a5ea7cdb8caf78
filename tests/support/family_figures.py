"""Sample figures of the benches that walk through model families."""

from typing import Any

FAMILY_FIGURES: dict[str, dict[str, Any]] = {
    "vision_families": {
        "mlx_vlm": "0.7.10",
        "folders": {
            "florence2": {"gets": "refused", "reason": "TypeError"},
            "gemma3": {
                "gets": "paged",
                "layers": [4, 4],
                "alone": "equal",
                "batch": "equal",
                "gathers": [0, 0],
            },
            "kimi_k25": {
                "gets": "gather",
                "layers": [4, 4],
                "alone": "equal",
                "batch": "mlx-vlm cannot",
                "gathers": [132, 0],
            },
            "phi3_v": {"gets": "not built", "reason": "AttributeError"},
        },
    },
    "model_families": {
        "files": {
            "bitnet": {"gets": "not run", "reason": "runs on Metal only"},
            "gemma2": {
                "gets": "gather",
                "paged_layers": 2,
                "mlx_lm_caches": {},
                "stock_repeats": True,
                "alone": "equal",
                "batch": "equal",
                "stock_batch": "cannot",
                "compiled": "yes",
                "compiled_tokens": "differs",
            },
            "deepseek_v3": {
                "gets": "decode",
                "paged_layers": 3,
                "mlx_lm_caches": {},
                "stock_repeats": True,
                "alone": "equal",
                "batch": "equal",
                "stock_batch": "equal",
                "compiled": "yes",
                "compiled_tokens": "equal",
            },
            "gpt_oss": {
                "gets": "paged",
                "paged_layers": 2,
                "mlx_lm_caches": {"RotatingKVCache": 2},
                "stock_repeats": True,
                "alone": "equal",
                "batch": "differs",
                "stock_batch": "differs",
                "compiled": "ValueError: [eval] Attempting to eval an array",
                "compiled_tokens": "equal",
            },
            "mamba": {
                "gets": "states",
                "paged_layers": 0,
                "mlx_lm_caches": {"ArraysCache": 2},
                "stock_repeats": False,
                "alone": "equal",
                "batch": "equal",
                "stock_batch": "differs",
                "compiled": "it has no pages",
                "compiled_tokens": "equal",
            },
        }
    },
}
