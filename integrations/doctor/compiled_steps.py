"""Compares decode steps that are recorded once and repeated with steps that Python takes.

A small random model takes them, in factories like those of users: recordings that cannot be made,
computed, or be told from Python's steps show here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models import llama

from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.kernels.pages.backend import Backend
from paged_kv.kernels.self_test import Check

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 4, 2, 64, 256
# So that a page fills within the steps that are compared.
PROMPT_TOKENS, STEPS, TIMED_STEPS = 240, 40, 8
REPETITIONS = 7
ROWS = (1, 3)
POOL_BYTES = 64 << 20
# Logits are of size 1. Both ways gave equal ones with plain operations on a CPU; a GPU may round to
# 16 bits less often in compiled operations. Positions that are wrong by one change them by 0.11.
TOLERANCE = 3e-2


def why_not(backend: Backend) -> str | None:
    """Why factories of this backend compile no steps; None if they do."""
    recorder = backend.recorder
    if recorder is None:
        return f"MLX cannot record the {backend.name} backend"
    return None if recorder.pays else f"they are not known to pay on the {backend.name} backend"


def check() -> Check:
    """Compares the logits of compiled steps with those of steps that Python takes.

    Its run raises a RuntimeError if no step can be compiled.
    """
    return Check("compiled steps", "of a small model", _error, TOLERANCE)


def relative_time() -> float:
    """The time of compiled steps relative to those that Python takes in turns with them, for one
    sequence."""
    model = _model()
    works = (_steps(_Decode(model, 1, compile=each)) for each in (True, False))
    return ratio(*in_turns(*works, repetitions=REPETITIONS))


def _error() -> float:
    """The largest difference of two logits; not a number if one of them is none."""
    model, errors = _model(), []
    for rows in ROWS:
        compiled, python = (_Decode(model, rows, compile=each) for each in (True, False))
        for step in range(STEPS):
            tokens = _tokens(step, rows, 1)
            errors.append(np.abs(compiled.take(tokens) - python.take(tokens)).max())
        compiled.require_recordings()
    return float(np.max(errors))


def _steps(decode: _Decode) -> Callable[[], None]:
    def take() -> None:
        for step in range(TIMED_STEPS):
            decode.take(_tokens(step, 1, 1))

    return take


class _Decode:
    """Sequences of a prompt each, in a factory of their own."""

    def __init__(self, model: Any, rows: int, *, compile: bool) -> None:
        self._model = model
        self._factory = PagedCacheFactory(model, max_bytes=POOL_BYTES, compile=compile)
        prompts = []
        for row in range(rows):
            prompts.append(self._factory.make_cache())
            model(_tokens(row, 1, PROMPT_TOKENS + row), cache=prompts[-1])
        for recordings in self._factory.recordings.values():
            # Else some steps would have Python's logits, and a wrong recording would end.
            recordings.compares = False
        self._cache = [layers[0].merge(layers) for layers in zip(*prompts, strict=True)]

    def take(self, tokens: mx.array) -> npt.NDArray[np.float32]:
        """The logits of a step."""
        return np.array(self._model(tokens, cache=self._cache).astype(mx.float32))

    def require_recordings(self) -> None:
        """Raise a RuntimeError unless nearly all steps were repeated."""
        recordings = self._factory.recordings[self._factory.pool]
        if recordings.reason is not None or recordings.repeated < STEPS - 8:
            raise RuntimeError(recordings.reason or f"only {recordings.repeated} were repeated")


def _tokens(seed: int, rows: int, count: int) -> mx.array:
    return mx.random.randint(0, VOCABULARY, (rows, count), key=mx.random.key(seed))


def _model() -> Any:
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=HEADS * HEAD_DIM,
            num_hidden_layers=LAYERS,
            intermediate_size=2 * HEADS * HEAD_DIM,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-6,
            vocab_size=VOCABULARY,
        )
    )
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    return model
