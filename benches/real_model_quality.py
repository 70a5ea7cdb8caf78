"""The loss of quantised pages in real models: python -m benches.real_model_quality [NAME ...]

Models of `benches.real_models` compute in float32, so that "fp16" pages hold their own numbers bit
for bit, and what is compared with them has lost nothing else. mlx-lm's caches are its own
`QuantizedKVCache`, with groups of 64, in layers without a window: it has none for windows. They
read 2,048 tokens: behind that its products take minutes for each thousand on a CPU.

Three kinds of text: the source of Python's module statistics, Python's reference, and a chat of
paragraphs of this project's pages. The first tokens of each are read by all caches side by side, a
step at a time. `auto` may take two thirds of what 16-bit pages take, beside rings. Of 2,048 tokens
all are compared, of 4,096 every second, of 8,192 every fourth. A row is one model, one number of
tokens and one cache, over all texts:

    loss_percent             how much larger the perplexity is than with "fp16" pages, and its
    standard_error_percent   standard error over blocks of 512 tokens
    by_text                  the loss for each kind of text
    equal_percent            of all tokens, those whose likeliest next token is the same
    kl_mean, kl_99           nats a token by which the distributions diverge: the mean, and what
                             99 of 100 tokens stay below

Texts run in two processes, as nothing here is a time; the results file is written anew after each.
"""

from benches.openblas import BLAS

import argparse
import math
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean, stdev
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from benches.models import load_model
from benches.real_models.folders import MODELS
from benches.results_file import write_result
from benches.two_processes import finished
from paged_kv import PagedCacheFactory, PagePool

ROOT = Path(__file__).parent.parent
LENGTHS = (2048, 4096, 8192)
STOCK_LENGTH = 2048  # the longest that mlx-lm's own caches read
STEP, BLOCK, GROUP = 128, 512, 64
FORMATS: dict[str, Any] = {"q8": "q8", "q8/q4": ("q8", "q4"), "q4": "q4", "auto": "auto"}
PAGES = ("docs/troubleshooting.md", "docs/quickstart.md", "docs/server.md", "README.md")

Figures = dict[str, Any]
Caches = list[Any]


@dataclass
class Losses:
    """What one cache loses over one text, token by token."""

    nats: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    equal: int = 0

    def note(self, found: mx.array, exact: mx.array, following: list[int]) -> None:
        """Add a step: log probabilities [tokens, vocabulary] with this cache and with "fp16"."""
        indices = mx.array(following)[:, None]
        nats: Any = -mx.take_along_axis(found, indices, -1)[:, 0]
        divergences: Any = mx.sum(mx.exp(exact) * (exact - found), axis=-1)
        self.nats += nats.tolist()
        self.divergences += divergences.tolist()
        self.equal += int(mx.sum(mx.argmax(found, -1) == mx.argmax(exact, -1)))


def text_of(kind: str, tokenizer: Any) -> list[int]:
    """The tokens of a kind of text."""
    if kind == "code":
        library = Path(sysconfig.get_path("stdlib"))
        text = (library / "statistics.py").read_text(encoding="utf-8")
        return list(tokenizer.encode(text))
    if kind == "prose":
        return list(tokenizer.encode("\n\n".join(topics.values())))
    paragraphs = [
        paragraph
        for page in PAGES
        for paragraph in (ROOT / page).read_text(encoding="utf-8").split("\n\n")
    ]
    roles = ("user", "assistant")
    messages = [
        {"role": roles[number % 2], "content": paragraph}
        for number, paragraph in enumerate(paragraphs)
    ]
    if tokenizer.has_chat_template:
        return list(tokenizer.apply_chat_template(messages))
    lines = [f"{message['role']}: {message['content']}" for message in messages]
    return list(tokenizer.encode("\n\n".join(lines)))


KINDS = ("code", "prose", "chat")


def caches_of(model: Any, tokens: int) -> dict[str, Caches]:
    """A cache of each kind; "fp16" comes first."""
    exact = PagedCacheFactory(model, max_bytes="4GB")
    assert exact.can_admit(tokens)
    size = exact.pool.size
    rings = sum(group.bytes_for(tokens) for group in size.groups if group.ring)
    budget = rings + 2 * (size.bytes_for(tokens) - rings) // 3 + size.slack
    caches: dict[str, Caches] = {"fp16": exact.make_cache()}
    for name, page_format in FORMATS.items():
        most = budget if name == "auto" else "4GB"
        factory = PagedCacheFactory(model, page_format=page_format, max_bytes=most)
        caches[name] = factory.make_cache()
    for bits in (8, 4) if tokens <= STOCK_LENGTH else ():
        caches[f"mlx-lm {bits} bits"] = [
            QuantizedKVCache(GROUP, bits) if type(cache) is KVCache else cache
            for cache in make_prompt_cache(model)
        ]
    return caches


def log_probs(model: Any, cache: Caches, tokens: list[int], every: int) -> mx.array:
    """Log probabilities [tokens / every, vocabulary] of what follows `every` so many tokens."""
    hidden = model.model(mx.array([tokens]), cache=cache)[0, ::every]
    logits = model.model.embed_tokens.as_linear(hidden)
    found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(found)
    return found


def losses_of(name: str, kind: str, length: int) -> dict[str, Losses]:
    """What each cache loses over the first tokens of a text."""
    model, tokenizer = load_model(name)
    text = text_of(kind, tokenizer)[: length + 1]
    assert len(text) == length + 1, f"{kind} has {len(text)} tokens, {length + 1} are needed"
    caches, every = caches_of(model, length), every_of(length)
    losses = {cache: Losses() for cache in caches}
    for start in range(0, length, STEP):
        end = min(start + STEP, length)
        following = text[start + 1 : end + 1][::every]
        exact: mx.array | None = None
        for cache, layers in caches.items():
            found = log_probs(model, layers, text[start:end], every)
            exact = found if exact is None else exact
            losses[cache].note(found, exact, following)
    return losses


def every_of(length: int) -> int:
    """Of how many tokens one is compared, so that all lengths compare as many."""
    return length // min(LENGTHS)


def blocks(nats: list[float], exact: list[float], size: int) -> list[float]:
    """The nats a token that each block of `size` tokens loses."""
    return [
        mean(nats[start : start + size]) - mean(exact[start : start + size])
        for start in range(0, len(nats), size)
    ]


def loss_of(pairs: Iterable[tuple[list[float], list[float]]], size: int) -> Figures:
    """The loss of perplexity over texts, in percent, by the nats of each of their tokens and those
    with exact attention; its error is that over blocks of `size` tokens."""
    differences = [each for pair in pairs for each in blocks(*pair, size)]
    return {
        "loss_percent": 100 * math.expm1(mean(differences)),
        "standard_error_percent": 100 * stdev(differences) / math.sqrt(len(differences)),
    }


def row_of(of_texts: dict[str, dict[str, Losses]], cache: str, every: int) -> Figures:
    """The figures of one cache over texts of which `every` so many tokens are compared."""
    size = BLOCK // every
    own = [losses[cache] for losses in of_texts.values()]
    pairs = {k: (losses[cache].nats, losses["fp16"].nats) for k, losses in of_texts.items()}
    divergences = sorted(each for text in own for each in text.divergences)
    nats = [each for text in own for each in text.nats]
    return {
        "cache": cache,
        "perplexity": math.exp(mean(nats)),
        **loss_of(pairs.values(), size),
        "by_text": {k: 100 * math.expm1(mean(blocks(*pair, size))) for k, pair in pairs.items()},
        "equal_percent": 100 * sum(text.equal for text in own) / len(nats),
        "kl_mean": mean(divergences),
        "kl_99": divergences[int(0.99 * len(divergences))],
    }


def asked_models(description: str) -> list[str]:
    """The real models that the command line names; all if it names none."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    return parser.parse_args().names or list(MODELS)


Done = dict[tuple[str, int], dict[str, dict[str, Losses]]]


def figures_of(done: Done) -> Figures:
    """What the results file holds of the texts that are done."""
    rows = [
        {
            "model": model,
            "tokens": length,
            "texts": list(of_texts),
            **row_of(of_texts, cache, every_of(length)),
        }
        for (model, length), of_texts in sorted(done.items())
        for cache in next(iter(of_texts.values()))
    ]
    backend = PagePool(1, max_bytes=1 << 20).stats().backend
    return {"backend": backend, "blas": BLAS, "step": STEP, "block": BLOCK, "rows": rows}


def main() -> None:
    names = asked_models("Measure what quantised pages of models lose.")
    done: Done = {}
    calls = [(name, kind, length) for length in LENGTHS for name in names for kind in KINDS]
    for (name, kind, length), losses in finished(losses_of, calls):
        done.setdefault((name, length), {})[kind] = losses
        figures = figures_of(done)
        print(f"{name}, {length}, {kind}")
        write_result("real_model_quality", figures)


if __name__ == "__main__":
    main()
