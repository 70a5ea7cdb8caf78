"""Decides which library loads a model: mlx-vlm if it is to read images, else mlx-lm."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from mlx_lm.processors import PROCESSORS
from mlx_lm.utils import _get_classes

from paged_kv.extras import extra_module

_TEXT_ONLY = "this model takes no images: send text only"


def loading_with_mlx_vlm() -> Any:
    """The module that loads models with mlx-vlm.

    Raises:
        ValueError: the extra vlm is not installed.
    """
    return extra_module("paged_kv.integrations.mlx_vlm.loading", "vlm")


def refusal_of_mlx_vlm(config: dict[str, Any], options: argparse.Namespace) -> str | None:
    """Why mlx-vlm does not load a model, as a client that sends an image is told; None if it does.

    mlx-vlm loads what mlx-lm does not know, or would load without a part that sees images.

    Args:
        config: of the model.
        options: the server's.
    """
    mlx_lm_reads = config.get("model_type") in PROCESSORS or "vision_config" not in config
    if mlx_lm_reads and _mlx_lm_knows(config):
        return _TEXT_ONLY
    if find_spec("mlx_vlm") is None:
        return (
            "this server reads no images, as the extra for them is not installed: pip install "
            "'paged-kv[vlm]' where it runs, or send text only"
        )
    if not loading_with_mlx_vlm().knows(config):
        return (
            f"this server reads no images, as mlx-vlm has no model of the type "
            f"{config.get('model_type')!r}: send text only"
        )
    for option in ("draft_model", "kv_bits"):
        if getattr(options, option) is not None:
            named = f"--{option.replace('_', '-')}"
            return f"this server reads no images, as it was started with {named}: send text only"
    return None


def _mlx_lm_knows(config: dict[str, Any]) -> bool:
    try:
        _get_classes(config)
    except (KeyError, ValueError):
        return False
    return True
