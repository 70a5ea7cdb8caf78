"""The options of commands that load a model."""

from __future__ import annotations

from dataclasses import dataclass

from paged_kv.commands.arguments import name
from paged_kv.commands.model_names import NO_DRAFT_MODEL, named_model, require_model
from paged_kv.options import Options, option


def model_named(text: str) -> str:
    """The folder or repository that a text names, which may be that of the embedded model."""
    return str(named_model(name(text)))


@dataclass(frozen=True)
class ModelOptions(Options):
    """A model, what drafts for it, and the numbers that both compute with.

    Attributes:
        model: folder or Hugging Face repository of a model; stdlib-llama is a small one in this
            package, which writes text that looks like Python.
        draft_model: a smaller model with the same vocabulary, or a prediction head of the model,
            which drafts tokens for all prompts; or head, the one that comes with the model; or
            auto, the same if there is one; or ngram, which drafts what followed the same tokens
            earlier. Nothing is drafted where it is slower.
        dtype: convert the model's numbers to this format, and compute in it. On a CPU float32 is
            the quickest where OpenBLAS is installed.
    """

    model: str | None = option(None, parse=model_named)
    draft_model: str | None = option(None, parse=model_named, usual="no drafts")
    dtype: str | None = option(
        None, usual="the model's own", choices=["float32", "float16", "bfloat16"]
    )

    def require_models(self) -> None:
        """Check that models are there, before they are loaded.

        Raises:
            OSError: one is not, or its folder is incomplete.
        """
        if self.model is not None:
            require_model("--model", self.model)
        if self.draft_model not in NO_DRAFT_MODEL:
            require_model("--draft-model", str(self.draft_model))
