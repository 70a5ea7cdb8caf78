"""The limits of a model: the least --max-kv-bytes that holds its pages, the bytes of freed buffers
that MLX may keep for it, and its context length.

The budget is checked before the server says that it starts. The models are read without their
weights, so this takes a fraction of the time of a start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from paged_kv.allocator.errors import PoolExhausted
from paged_kv.checks import MOST_BYTES, format_size
from paged_kv.integrations.speculation.draft_models import divided_factories
from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.options import NO_DRAFT_MODEL
from paged_kv.server.options import ServerOptions


def require_sufficient_budget(options: ServerOptions) -> None:
    """Raise ValueError if --max-kv-bytes is a number, and the models need more. A model that is not
    on this machine yet, or that mlx-lm cannot read, is checked when it is loaded."""
    budget = options.cache.max_bytes
    if not isinstance(budget, int):
        return
    names = [options.model, options.draft_model]
    models = [_without_weights(name) for name in names if name not in NO_DRAFT_MODEL]
    known = [model for model in models if model is not None]
    if known and len(known) == len(models):
        needed = _sufficient(known, budget, options)
        if needed > budget:
            raise _too_small(budget, needed, options)


@contextmanager
def budget_named(options: ServerOptions) -> Iterator[None]:
    """Let an exhausted pool name the option of the budget, in a ValueError."""
    try:
        yield
    except PoolExhausted as error:
        raise _too_small(error.budget, error.sufficient_budget, options) from None


def _without_weights(name: str) -> Module | None:
    """A model whose weights stay on disk; None if it is not there, or not mlx-lm's."""
    try:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(name, local_files_only=True))
        model: Module = load_model(folder, lazy=True)[0]
    except Exception:
        # Loading it raises the same, with the words for it.
        return None
    return model


def _sufficient(models: list[Module], budget: int, options: ServerOptions) -> int:
    """A budget, at least this one, that holds a sequence of one token."""
    ample = MOST_BYTES
    cache = replace(options.cache, max_bytes=ample, store=None, offload=None)
    factories = divided_factories(models, cache, dtype=options.dtype)
    for factory in factories:
        factory.can_admit(0)  # makes its pool learn the size of a block
    needed = 0
    while needed < budget:  # of which each pool gets a share
        needed = budget
        for pool in [factory.pool for factory in factories]:
            share = pool.budget.max_bytes
            least = max(1, needed * share // ample)
            held = pool.reclaimer.holding(pool.size.bytes_for(1), least)
            budget = max(budget, -(-held * ample // share))
    return needed


def _too_small(budget: int, needed: int | None, options: ServerOptions) -> ValueError:
    is_given = isinstance(options.cache.max_bytes, int)
    option = "--max-kv-bytes" if is_given else "the machine's memory"
    models = "the model needs" if options.draft_model in NO_DRAFT_MODEL else "the models need"
    least = "more" if needed is None else f"at least {format_size(needed)} ({needed:,} bytes)"
    return ValueError(
        f"{option} gives pages {format_size(budget)}, and {models} {least} for a block of "
        f"{PAGE_SIZE} tokens: give --max-kv-bytes more, or choose a smaller --model"
    )


def freed_buffers_limit(model: Any, step_tokens: int) -> int:
    """The bytes of freed buffers that a prompt step of so many tokens can use again: twice what the
    matrices of a layer put out, of the layer with the most.

    On Metal and CUDA MLX keeps as many as memory holds, for later arrays of about their size, so a
    process that computes steps of all lengths grows past what its weights and pages take. What the
    layers of one prompt step hand on to each other is enough: no limit from 0 upwards changed the
    throughput of a CPU by more than its noise, and a decode step needs less. mlx-lm gives
    everything back after each prompt step.

    An operation between two matrices has an output as large as its input, hence twice. In float32,
    a llama of hidden size 1024 has 96 MB for 1,024 tokens, and a step held 79 MB at its peak.
    """
    lists = [each for part in model.modules() for each in part.values() if isinstance(each, list)]
    # Layers of other processes are None there.
    layers = (layer for each in lists for layer in each if isinstance(layer, Module))
    return 2 * step_tokens * max(map(_output_bytes, layers), default=0)


def _output_bytes(layer: Any) -> int:
    """Bytes that all matrices of a layer put out for a token. A quantised one computes in the dtype
    of its scales."""
    matrices: list[tuple[Any, Any]] = [
        (each["weight"], each.get("scales", each["weight"]).dtype)
        for each in layer.modules()
        if "weight" in each and each["weight"].ndim > 1
    ]
    return sum(weight.shape[-2] * dtype.size for weight, dtype in matrices)


# Where the configs of vision models keep that of the language model.
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

# The names that configs have for it, as vLLM looks for them.
_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)

# Of these kinds of rotary embeddings the config names the length after scaling.
_SCALED = ("longrope", "su", "llama3", "default", "mrope")


def context_length(config: dict[str, Any]) -> int | None:
    """The most tokens that a model was made for; None if its config does not say.

    Follows vLLM's `_get_and_verify_max_len`, but of several lengths the longest counts: this is
    for refusing prompts.
    """
    parts = [config, *[config[part] for part in _PARTS if isinstance(config.get(part), dict)]]
    return max((length for part in parts for length in _lengths(part)), default=None)


def _lengths(config: dict[str, Any]) -> list[int]:
    lengths = [config[name] for name in _NAMES if _is_length(config.get(name))]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    is_scaled = kind in _SCALED or str(config.get("model_type")).startswith("gemma3")
    if is_scaled or not lengths or not isinstance(factor, int | float):
        return lengths
    unscaled = (scaling.get(f"original_{_NAMES[0]}"), config.get(_NAMES[0]))
    base = next((each for each in unscaled if each is not None and _is_length(each)), max(lengths))
    return [*lengths, int(base * factor)]


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
