"""Small random instances of mlx-lm's model files, for tests that need every family.

``zoo.json`` maps a model file of ``mlx_lm.models`` to a small config: few layers (one or two
of each kind the family has), hidden size 64, head dimension 32 where the family leaves a choice,
sliding windows of 32 tokens, vocabulary 128 (phi3small writes to fixed ids, so it has all
100352). Left out: bitnet and muse_spark, which run on Metal only, and olmo, which needs ai2-olmo.
``small_model`` builds it with weights that make its output depend on the cached keys and values.
"""

import copy
import importlib
import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

ZOO: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("zoo.json").read_text())
"""Model file name, as in ``mlx_lm.models.<name>``, to what its ``ModelArgs.from_dict`` takes."""

FAMILIES = [
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "gemma3n",
    "deepseek_v3",
    "qwen3_next",
    "phi3",
    "cohere2",
    "stablelm",
    "plamo",
    "plamo2",
    "minimax_m3_vl",
    "plamo3",
    "iquestloopcoder",
]
"""One of each that asks something of its own from a cache."""


def small_model(name: str, *, seed: int = 0, **changes: Any) -> Module:
    """Build ``ZOO[name]``, with some changes, in float32 with weights that depend only on those,
    ``name`` and ``seed``.

    Every floating-point parameter is replaced, integer ones stay:

    - Matrices and stacks of them, shape (..., out, in): normal, std 0.2. With 32-64 inputs of
      unit variance a layer then adds 1-2 per channel to the residual stream, well above the
      embeddings' 0.2, so the next token depends on what attention read and not just on the
      last token; logits have a std of 1-3.
    - Vectors, shape (n,) (norm weights, biases, decay rates, sinks): what the model starts
      with plus noise of std 0.1, as values like Mamba's log decay have to stay in their range.

    Reseeds MLX's global generator, as models draw some of those start values from it.
    """
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    # A copy: some of these classes write into the nested config that they are given.
    model = module.Model(module.ModelArgs.from_dict({**copy.deepcopy(ZOO[name]), **changes}))

    def redraw(p: mx.array) -> mx.array:
        if not mx.issubdtype(p.dtype, mx.floating):
            return p
        noise = mx.random.normal(p.shape)
        return 0.2 * noise if p.ndim > 1 else p.astype(mx.float32) + 0.1 * noise

    model.update(tree_map(redraw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return cast(Module, model)


def llama_for(tokenizer: Any) -> Module:
    """A small llama of two full layers, with the vocabulary of a tokenizer."""
    layers = ["full_attention"] * 2
    return small_model(
        "llama", num_hidden_layers=2, layer_types=layers, vocab_size=tokenizer.vocab_size
    )


def model_that_tells_keys_apart() -> Any:
    """A small model whose queries tell keys apart, as those of trained models do."""
    model: Any = small_model("qwen3")
    for layer in model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight = 1.5 * mx.ones_like(norm.weight)
    return model
