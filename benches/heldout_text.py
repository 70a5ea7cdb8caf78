"""Loads the models of this repository and the real ones, and text that the former have not seen.

Those of this repository were trained on the standard library of CPython 3.11.7 without these
modules. A file is tokens that begin with the end-of-text token, as in training.
"""

import sysconfig
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load

from benches.real_models.folders import model_folder
from paged_kv.embedded import embedded_model

MODULES = (
    "argparse",
    "configparser",
    "csv",
    "fractions",
    "heapq",
    "queue",
    "sched",
    "shlex",
    "statistics",
    "textwrap",
)
MODELS = {
    "stdlib-llama": embedded_model(),
    "stdlib-gemma3": str(Path(__file__).parent.parent / "tests" / "models" / "stdlib-gemma3"),
}


def model_in_float32(name: str) -> tuple[Any, Any]:
    """A model of this repository, or a real one, and its tokenizer.

    Raises:
        RealModelError: the real model is not there; the message says how to get it.
    """
    model, tokenizer = load(MODELS.get(name) or str(model_folder(name)))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


def files(tokenizer: Any) -> list[list[int]]:
    """The tokens of each module, in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    return [tokenizer.encode((library / f"{name}.py").read_text()) for name in MODULES]


def contexts(tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """`count` pieces of `tokens` + 1 tokens, each of one file, spread evenly over all files."""
    pieces = [
        file[start : start + tokens + 1]
        for file in files(tokenizer)
        for start in range(0, len(file) - tokens, tokens)
    ]
    assert len(pieces) >= count, f"{len(pieces)} pieces of {tokens} tokens, {count} are needed"
    return [pieces[index * len(pieces) // count] for index in range(count)]
