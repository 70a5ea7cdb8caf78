"""Numbers that stand in the sentences of README.md and docs/, by name."""

from collections.abc import Callable
from typing import Any

from benches.headline_tables import q4_bits
from benches.table_cells import megabytes, millis, percent

Figures = dict[str, Any]


def _files_that_get(*kinds: str) -> Callable[[Figures], str]:
    return lambda figures: str(sum(each["gets"] in kinds for each in figures["files"].values()))


def _least_gain(figures: Figures) -> str:
    return f"{min(row['paged_over_mlx_lm'] for row in figures['rows']):.2f}"


def _loss_of(page_format: str) -> Callable[[Figures], str]:
    """How much larger the perplexity of stdlib-llama is than with pages of 16 bits."""
    return lambda figures: (
        f"{figures['text']['stdlib-llama']['rows'][page_format]['loss_percent']:.2f} %"
    )


def _prompt_speed_of(page_format: str) -> Callable[[Figures], str]:
    """Reading a prompt, beside pages of 16 bits: above 1 is quicker."""

    def told(figures: Figures) -> str:
        plain, quantised = (
            figures["model_of_1"][name]["prefill"] for name in ("fp16", page_format)
        )
        return f"{plain / quantised:.2f}"

    return told


def _ring_bytes(cache: str) -> Callable[[Figures], str]:
    """Of the shortest sequence, with the write_chunk that is used unless another is asked for."""
    return lambda figures: megabytes(figures["memory"][0][f"{cache}_bytes"])


NUMBERS: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "model files": ("model_families", lambda figures: str(len(figures["files"]))),
    "model files with pages": ("model_families", _files_that_get("paged", "decode", "gather")),
    "model files that decode from pages": ("model_families", _files_that_get("paged", "decode")),
    "least decode gain": ("whole_model", _least_gain),
    "bits of q4": ("held_bytes", lambda figures: f"{q4_bits(figures)[1]:.2f}"),
    "loss of q8": ("quantised_quality", _loss_of("q8")),
    "loss of q4": ("quantised_quality", _loss_of("q4")),
    "prompt speed of q8": ("quantised_kernels", _prompt_speed_of("q8")),
    "prompt speed of q4": ("quantised_kernels", _prompt_speed_of("q4")),
    "bytes of mlx-lm's windows": ("rings", _ring_bytes("mlx_lm")),
    "bytes of rings": ("rings", _ring_bytes("paged")),
    "share of monitoring": ("publishing", lambda figures: percent(figures["busy_share"], 1)),
    "time of look-up": ("prefix_reuse", lambda figures: millis(figures["look_up"]["seconds"])),
    "gain of optimistic admission": (
        "admission",
        lambda figures: f"{figures['short_answers']['1900']['speed_ratio']:.1f}",
    ),
}
"""The bench of each, and what tells it from that bench's figures."""
