"""Decides which library loads a model: mlx-vlm if it is to read images, else mlx-lm."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from mlx_lm.processors import PROCESSORS
from mlx_lm.utils import _get_classes

from paged_kv.extras import extra_module, install_command

_TEXT_ONLY = "this model takes no images: send text only"


def loading_with_mlx_vlm() -> Any:
    """The module that loads models with mlx-vlm.

    Raises:
        ValueError: the extra vlm is not installed.
    """
    return extra_module("paged_kv.integrations.mlx_vlm.image_generation", "vlm")


def refusal_of_mlx_vlm(config: dict[str, Any], mlx_lm_options: dict[str, Any]) -> str | None:
    """Why mlx-vlm does not load a model, as a client that sends an image is told; None if it does.

    mlx-vlm loads what mlx-lm does not know, or would load without a part that sees images.

    Args:
        config: of the model.
        mlx_lm_options: options that only models of mlx-lm take, and their values or None.

    Raises:
        ValueError: mlx-lm does not know the model, and mlx-vlm is missing, does not know it either,
            or does not take an option.
    """
    kind, is_known = config.get("model_type"), _mlx_lm_knows(config)
    if is_known and (kind in PROCESSORS or "vision_config" not in config):
        return _TEXT_ONLY
    if find_spec("mlx_vlm") is None:
        if not is_known:
            raise ValueError(
                f"mlx-lm has no model of the type {kind!r}: a newer one may (pip install --upgrade "
                f"mlx-lm), and mlx-vlm if the model reads images ({install_command('vlm')})"
            )
        return (
            "this server reads no images, as the extra for them is not installed: pip install "
            "'paged-kv[vlm]' where it runs, or send text only"
        )
    if not loading_with_mlx_vlm().knows(config):
        if not is_known:
            raise ValueError(
                f"neither mlx-lm nor mlx-vlm has a model of the type {kind!r}: newer ones may (pip "
                "install --upgrade mlx-lm mlx-vlm)"
            )
        return (
            f"this server reads no images, as mlx-vlm has no model of the type {kind!r}: send "
            "text only"
        )
    if used := [option for option, value in mlx_lm_options.items() if value is not None]:
        if not is_known:
            raise ValueError(
                f"{used[0]} does not work with models of mlx-vlm, and mlx-lm has none of the type "
                f"{kind!r}: leave it out"
            )
        return f"this server reads no images, as it was started with {used[0]}: send text only"
    return None


def _mlx_lm_knows(config: dict[str, Any]) -> bool:
    if "model_file" in config:  # a checkpoint with code of its own
        return True
    try:
        _get_classes(config)
    except (KeyError, ValueError):
        return False
    return True
