"""The options of `paged-kv generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paged_kv.integrations.cache_options import CACHE_OPTIONS, CacheOptions
from paged_kv.options import ModelOptions, option, part, positive, seed, temperature


@dataclass(frozen=True)
class GenerateOptions(ModelOptions):
    """What is generated, with which model and caches.

    Attributes:
        prompt: the prompt, or - for standard input; several prompts are generated as one batch.
        image: a file or an address of an image that the prompt is about, for a --model of mlx-vlm;
            may be repeated (needs the extra vlm).
        ignore_chat_template: give the model the prompt without its chat template.
        num_samples: samples for each prompt, which share its pages.
        max_tokens: the most tokens to generate.
        temp: temperature; 0 is greedy.
        seed: seed of the sampler.
        num_draft_tokens: the most tokens to draft for a prompt in a step.
        cache: the options of its caches.

    Raises:
        ValueError: options do not fit together.
    """

    prompt: Sequence[str] = option((), action="append", usual="standard input")
    image: Sequence[str] = option((), action="append")
    ignore_chat_template: bool = option(False)
    num_samples: int = option(1, parse=positive)
    max_tokens: int = option(100, parse=positive)
    temp: float | None = option(None, parse=temperature, usual="0, or 1 for several samples")
    seed: int | None = option(None, parse=seed)
    num_draft_tokens: int = option(4, parse=positive, needs="draft_model")
    cache: CacheOptions = part(CACHE_OPTIONS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temp == 0 and self.num_samples > 1:
            raise ValueError(
                f"--temp 0 makes {self.num_samples} equal samples: raise --temp, or leave out "
                "--num-samples"
            )
        if not self.image:
            return
        if self.model is None:
            raise ValueError(
                "--image needs a --model of mlx-vlm: the one in this package reads text"
            )
        others = {
            "--num-samples": self.num_samples > 1,
            "several --prompt": len(self.prompt) > 1,
            "--draft-model": self.draft_model is not None,
        }
        if used := [option for option, is_used in others.items() if is_used]:
            raise ValueError(f"--image makes one text of one prompt: leave out {', '.join(used)}")

    @property
    def temperature(self) -> float:
        """The temperature to sample with: several samples are wanted because they differ, and 1
        takes them from the model's own distribution, which is also the default of vLLM."""
        return float(self.num_samples > 1) if self.temp is None else self.temp


GENERATE_OPTIONS = GenerateOptions()
