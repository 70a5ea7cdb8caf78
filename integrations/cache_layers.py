"""Names the file that a model is of."""

from mlx.nn.layers.base import Module


def model_file(model: Module) -> str:
    """The name of the model's file in mlx-lm, or of its folder in mlx-vlm, such as "llama"."""
    whole = getattr(model, "whole", model)  # of a `TextModel`
    parts = type(whole).__module__.split(".")
    return parts[2] if parts[:2] == ["mlx_vlm", "models"] else parts[-1]
