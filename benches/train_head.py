"""Trains a prediction head: python -m benches.train_head MODEL FOLDER [--minutes N]

MODEL is of `benches.models`, whose weights stay as they are. The texts are the standard
library of this Python, without its tests and without the files that benches measure on, and the
topics of its help. Of each window of tokens the head learns the model's own distributions, a first
time from the model's hidden states, then from its own ones, as deep as `DEPTH`: drafts go on from
what the head has drafted.

FOLDER gets the head as `paged_kv.integrations.heads.loading` reads it.
"""

from benches.openblas import BLAS

import argparse
import json
import math
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx import optimizers
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map

from benches.models import MODULES, load_model
from paged_kv.integrations.heads.loading import LAYER_HEAD
from paged_kv.integrations.heads.prediction_head import HeadArgs, LayerHead, ModelParts, llama_head

WINDOW = 256
DEPTH = 3
# The output layer is most of a step of small models.
SPARSE = 6
RATE = 2e-3
WARM_UP = 50
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}


def texts() -> list[str]:
    """What heads learn from."""
    library = Path(sysconfig.get_path("stdlib"))
    held_out = {library / f"{name}.py" for name in MODULES}
    found = [
        path
        for path in sorted(library.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(library).parts) and path not in held_out
    ]
    read = [path.read_text(encoding="utf-8", errors="replace") for path in found]
    return [*read, *topics.values()]


def windows(tokenizer: Any, tokens_at_once: int) -> Iterator[mx.array]:
    """Tokens [B, WINDOW] of all texts in a random order, again and again."""
    rng = random.Random(0)
    stream: list[int] = []
    while True:
        order = texts()
        rng.shuffle(order)
        for text in order:
            stream += tokenizer.encode(text)
            while len(stream) >= tokens_at_once:
                yield mx.array(stream[:tokens_at_once]).reshape(-1, WINDOW)
                del stream[:tokens_at_once]


def shifted(hidden: mx.array) -> mx.array:
    """Of each token, the state of the one before."""
    return mx.pad(hidden[:, :-1], [(0, 0), (1, 0), (0, 0)])


def loss_of(
    head: LayerHead, parts: ModelParts, embeddings: mx.array, hidden: mx.array, first: int
) -> mx.array:
    """The mean over all depths of how far states are from the model's, beside their size, and of
    the cross-entropy with the model's distributions at every `SPARSE`-th token from `first` on."""
    states, losses, size = hidden, [], mx.square(hidden).mean()
    for depth in range(1, DEPTH + 1):
        states = head(embeddings, shifted(states))
        wrong = mx.square(states[:, depth - 1 :] - hidden[:, depth - 1 :]).mean() / size
        at = slice(first + depth - 1, None, SPARSE)
        wanted = mx.softmax(parts.logits(hidden[:, at]), axis=-1)
        logits = parts.logits(states[:, at])
        found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        losses.append(wrong - (wanted * found).sum(axis=-1).mean())
    return mx.stack(losses).mean()


def train(name: str, minutes: float, tokens_at_once: int) -> tuple[LayerHead, HeadArgs]:
    model, tokenizer = load_model(name)
    model.freeze()
    parts, of_model = ModelParts(model), model.args
    args = HeadArgs(
        hidden_size=of_model.hidden_size,
        num_attention_heads=of_model.num_attention_heads,
        num_key_value_heads=of_model.num_key_value_heads,
        head_dim=of_model.head_dim or of_model.hidden_size // of_model.num_attention_heads,
        intermediate_size=of_model.intermediate_size,
        vocab_size=of_model.vocab_size,
        rms_norm_eps=of_model.rms_norm_eps,
        rope_theta=of_model.rope_theta,
    )
    mx.random.seed(0)
    head = llama_head(args)
    optimizer = optimizers.AdamW(RATE, weight_decay=0.01)
    step = value_and_grad(head, loss_of)
    began, losses = perf_counter(), []
    for at, tokens in enumerate(windows(tokenizer, tokens_at_once)):
        share = (perf_counter() - began) / (60 * minutes)
        if share >= 1:
            break
        optimizer.learning_rate = RATE * min(1, (at + 1) / WARM_UP) * _decayed(share)
        hidden = parts.backbone(tokens)
        embeddings = parts.embed(tokens)
        mx.eval(hidden, embeddings)
        loss, gradients = step(head, parts, embeddings, hidden, at % SPARSE)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(head, gradients)
        mx.eval(head.parameters(), optimizer.state, loss)  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if at % 50 == 49:
            mean = sum(losses[-50:]) / 50
            print(f"{at + 1} steps, {60 * minutes * share:.0f} s: {mean:.4f}", flush=True)
    return head, args


def _decayed(share: float) -> float:
    """Of the rate, after this share of the time: a cosine."""
    return 0.02 + 0.98 * (1 + math.cos(math.pi * share)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a prediction head.")
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=50)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step (default: 4096)")
    arguments = parser.parse_args()
    head, args = train(arguments.model, arguments.minutes, arguments.tokens)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    head.update(tree_map(lambda each: each.astype(mx.bfloat16), head.parameters()))  # type: ignore[no-untyped-call]
    config = {**asdict(args), "model_type": LAYER_HEAD}
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = dict(tree_flatten(head.parameters()))  # type: ignore[no-untyped-call]
    mx.save_safetensors(str(arguments.folder / "model.safetensors"), weights, {"format": "mlx"})
    print(f"{arguments.folder}: {sum(each.nbytes for each in weights.values()):,} bytes, {BLAS}")


if __name__ == "__main__":
    main()
