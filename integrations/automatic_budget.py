"""Chooses the memory for pages by what else a process takes: weights, prompt steps, the system."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from paged_kv.integrations.working_memory import MeasuredStep, WorkingMemory
from paged_kv.kernels.pages.memory import device_bytes
from paged_kv.sizes import format_size

logger = logging.getLogger("paged_kv")

# Tokens of a prompt step: mlx-lm's, and shorter ones where memory is short.
PROMPT_STEPS = (2048, 1024, 512, 256)
# Of what weights leave, the most that a prompt step may take; else it is made shorter.
STEP_SHARE = 0.25
# The context whose end a prompt step may be at: it matters to models that expand keys and values.
LONG_CONTEXT = 32_768
# Of the memory, for the system, other programs, and what Python and MLX take besides arrays.
RESERVED_SHARE = 0.1


class AutomaticBudget(NamedTuple):
    """The bytes that pages may take, and the tokens of a prompt step for which the rest is left."""

    max_bytes: int
    prompt_step: int


def reserve_of(memory: int) -> int:
    """The bytes of a machine's memory that are left to the system."""
    return int(RESERVED_SHARE * memory)


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights, whether or not they were read."""
    flat: Any = tree_flatten(model.parameters())
    return sum({id(array): array.nbytes for _, array in flat}.values())


def automatic_budget(model: Module, measure: Callable[[], WorkingMemory]) -> AutomaticBudget:
    """The budget for the pages of a model: what the device has, less a reserve, what MLX holds or
    will hold of weights, and a prompt step, which `measure` measures."""
    memory = device_bytes()
    held = max(mx.get_active_memory(), weight_bytes(model))
    try:
        step = measure()
    except Exception as error:  # models raise anything
        logger.warning("a prompt step cannot be measured, so a fifth is left for it: %r", error)
        fifth = memory // 5
        step = WorkingMemory((MeasuredStep(PROMPT_STEPS[0], fifth, fifth),))
    left = memory - reserve_of(memory) - held
    sizes = {tokens: step.bytes_for(tokens, LONG_CONTEXT) for tokens in PROMPT_STEPS}
    fitting = (tokens for tokens, nbytes in sizes.items() if nbytes <= STEP_SHARE * left)
    tokens = next(fitting, PROMPT_STEPS[-1])
    taken = sizes[tokens]
    budget = AutomaticBudget(max(1, left - taken), tokens)
    logger.info(
        "max_bytes is auto: of %s, %s are left to the system, weights take %s, a prompt step of "
        "%s tokens %s; pages may take %s",
        format_size(memory),
        format_size(reserve_of(memory)),
        format_size(held),
        f"{tokens:,}",
        format_size(taken),
        format_size(budget.max_bytes),
    )
    return budget
