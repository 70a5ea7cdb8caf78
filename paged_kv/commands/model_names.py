"""The options of commands that load a model, and checks of its name before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paged_kv.commands.arguments import name
from paged_kv.embedded import EMBEDDED, embedded_model
from paged_kv.options import Options, option

# Where a draft model can be named: prompt look-up; the prediction head that comes with the model;
# the same if there is one, and else no drafts.
NGRAM, OWN_HEAD, AUTO_HEAD = "ngram", "head", "auto"
NO_DRAFT_MODEL = frozenset({None, NGRAM, OWN_HEAD, AUTO_HEAD})

# The Hub takes no name that begins with a dot or a dash: ./model is a folder.
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def named_model(text: str) -> str:
    """The folder or repository that a text names: that of the embedded model for its name, unless
    there is a folder of this name here; any other name as it is."""
    return embedded_model() if text == EMBEDDED and not Path(text).exists() else name(text)


def require_model(option: str, name: str) -> None:
    """Check that a name may be a model: mlx-lm takes a missing folder for a repository.

    Args:
        option: that names the model.
        name: a folder or a Hugging Face repository.

    Raises:
        FileNotFoundError: the name is neither a folder nor of the form of a repository, or the
            folder lacks files of a model.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if _REPOSITORY.fullmatch(name):
            return
        raise FileNotFoundError(
            f"there is no folder {name!r}: give {option} the folder of a model, or a Hugging Face "
            "repository such as mlx-community/Llama-3.2-1B-Instruct-4bit"
        )
    for pattern, meaning in (("config.json", "configuration"), ("*.safetensors", "weights")):
        if not any(folder.glob(pattern)):
            raise FileNotFoundError(
                f"the folder {name!r} holds no {meaning} ({pattern}): give {option} a complete "
                "folder, as a download or `mlx_lm.convert` makes it"
            )


def not_loaded(option: str, name: str, error: BaseException) -> ValueError:
    """What to raise for an error of mlx-lm, transformers or the Hub, which are of many types."""
    said = " ".join(str(error).split()).rstrip(".")
    return ValueError(
        f"{option} {name} cannot be loaded: {type(error).__name__}: {said}: {_remedy(said)}"
    )


def _remedy(said: str) -> str:
    if re.search(r"[Mm]odel type .* not supported", said):
        return "a newer mlx-lm may know it (pip install --upgrade mlx-lm), or choose another model"
    if "Hub" in said or "Repository" in said:
        return "check its name and your network, or name a folder"
    return "check that its files are complete, or download them again"


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

    model: str | None = option(None, parse=named_model)
    draft_model: str | None = option(None, parse=named_model, usual="no drafts")
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
