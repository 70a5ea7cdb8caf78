"""The small model that comes inside the package."""

from importlib.resources import files

EMBEDDED = "stdlib-llama"
"""Its name, where a command takes the name of a model."""


def embedded_model() -> str:
    """The folder of `stdlib-llama`, for `mlx_lm.load`: a llama of 5.5 million numbers in bfloat16
    that writes what looks like Python, so that examples run without a download."""
    return str(files("paged_kv") / "models" / EMBEDDED)
