"""Contexts that memory does not hold: python -m benches.offloaded_contexts [NAME ...]

Real models in float32 read 7,168 tokens of a text, then decode one token by one, with as many of
them read as 1/8 of the context, while `max_bytes` holds all, 1/2 or 1/4 of its pages and steps wait
for those that they want, or not. Beside them exact attention, with all in memory.

`quality` has rows of one model, in the mean of 128 tokens of each text of
`benches.real_model_quality`:

    loss      how much larger the perplexity of the tokens is than with exact attention, in percent,
              and its standard error over blocks of 32 tokens
    fetched   pages of a layer that a step read from the file
    late      pages of a layer that a step left out, because they had not come

`speed` has the same ways in turns of 16 tokens of one text: what a step takes beside an exact one.
"""

from benches.openblas import BLAS

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import mlx.core as mx

from benches.models import load_model, read
from benches.real_model_quality import KINDS, asked_models, loss_of, text_of
from benches.results_file import write_result
from benches.two_processes import finished
from paged_kv import PagedCacheFactory, PagedKVCache
from paged_kv.integrations.bench.turns import in_turns, ratio
from paged_kv.kernels.pages.page_format import PAGE_SIZE

BEFORE, STEP, MEASURED, BLOCK, SHARE = 7168, 256, 128, 32, 8
PARTS = (2, 3)
TURN, TURNS = 16, 9
EXACT, ALL = "exact", "all in memory"

Figures = dict[str, Any]


class Decoder:
    """Decodes a text behind its first tokens."""

    def __init__(
        self, factory: PagedCacheFactory, model: Any, tokens: list[int], states: list[Any]
    ) -> None:
        self._factory = factory
        self._model = model
        self._tokens = tokens
        factory.make_cache()  # tries how the model attends
        # They go to the latest pool.
        self._cache = [PagedKVCache.from_state(state) for state in states]
        self._before = factory.stats()
        self._nats: list[float] = []

    def decode(self, count: int) -> None:
        """Decode so many tokens more."""
        first = BEFORE + len(self._nats)
        for at in range(first, first + count):
            logits = self._model(mx.array([[self._tokens[at]]]), cache=self._cache)[0, 0]
            own: Any = mx.logsumexp(logits) - logits[self._tokens[at + 1]]
            self._nats.append(own.item())

    def figures(self) -> Figures:
        """The nats of each token, and the pages of a step."""
        after, steps = self._factory.stats(), len(self._nats)
        return {
            "nats": self._nats,
            "fetched": (after.pages_fetched - self._before.pages_fetched) / steps,
            "late": (after.pages_late - self._before.pages_late) / steps,
        }


@contextmanager
def ways_of(model: Any, tokens: list[int]) -> Iterator[dict[str, Callable[[], Decoder]]]:
    """What makes a decoder of each way, by its label."""
    read_tokens = BEFORE // SHARE
    whole = PagedCacheFactory(model, read_tokens=read_tokens, max_bytes="4GB")
    read_once = read(model.model, whole.make_cache(), tokens[:BEFORE], STEP)
    states = [layer.state for layer in read_once]
    (group,) = [group for group in whole.pool.groups if group.window is None]
    pages = -(-len(tokens) // PAGE_SIZE) * group.size.written_bytes
    others = whole.stats().bytes_mapped - BEFORE // PAGE_SIZE * group.size.written_bytes
    unused = 1 / 7 if others else 0  # where slabs are of several sizes
    ways: dict[str, dict[str, Any]] = {EXACT: {"read_tokens": None}, ALL: {}}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            for waits in (True, False):
                ways[f"1/{part} in memory, {'waiting' if waits else 'not waiting'}"] = {
                    "max_bytes": int((1 + unused) * (others + pages // part)),
                    "offload": Path(folder),
                    "wait_for_pages": waits,
                }

        def new(options: dict[str, Any]) -> Decoder:
            given = {"read_tokens": read_tokens, "max_bytes": "4GB", **options}
            return Decoder(PagedCacheFactory(model, **given), model, tokens, states)

        yield {label: partial(new, options) for label, options in ways.items()}


def quality_of(name: str, kind: str) -> dict[str, Figures]:
    """The figures of each way, by its label."""
    model, tokenizer = load_model(name)
    found = {}
    with ways_of(model, text_of(kind, tokenizer)[: BEFORE + MEASURED + 1]) as ways:
        for label, new in ways.items():
            decoder = new()
            decoder.decode(MEASURED)
            found[label] = decoder.figures()
    return found


def quality_row(name: str, label: str, parts: list[dict[str, Figures]]) -> Figures:
    """The means over texts."""
    pairs = [(part[label]["nats"], part[EXACT]["nats"]) for part in parts]
    return {
        "model": name,
        "kept": label,
        "texts": len(parts),
        **loss_of(pairs, BLOCK),
        **{key: mean(part[label][key] for part in parts) for key in ("fetched", "late")},
    }


def speed_of(name: str) -> list[Figures]:
    """What a step of each way takes."""
    model, tokenizer = load_model(name)
    tokens = text_of(KINDS[0], tokenizer)[: BEFORE + (TURNS + 1) * TURN + 1]
    with ways_of(model, tokens) as ways:
        decoders = {label: new() for label, new in ways.items()}
        works = [partial(decoder.decode, TURN) for decoder in decoders.values()]
        seconds = in_turns(*works, repetitions=TURNS)
    return [
        {
            "model": name,
            "kept": label,
            "seconds": median(own) / TURN,
            "of_exact": ratio(own, seconds[0]),
            "late": decoder.figures()["late"],
        }
        for (label, decoder), own in zip(decoders.items(), seconds, strict=True)
    ]


def main() -> None:
    names = asked_models("Measure contexts that memory does not hold.")
    done: dict[str, list[dict[str, Figures]]] = {}
    figures: Figures = {"blas": BLAS, "before": BEFORE, "read_share": SHARE}
    for (name, kind), part in finished(quality_of, [(n, kind) for kind in KINDS for n in names]):
        done.setdefault(name, []).append(part)
        figures["quality"] = [
            quality_row(each, label, parts) for each, parts in done.items() for label in parts[0]
        ]
        print(f"{name}, {kind}")
        write_result("offloaded_contexts", figures)
    figures["speed"] = []
    for name in names:
        figures["speed"] += speed_of(name)
        print(f"{name}, speed")
        write_result("offloaded_contexts", figures)


if __name__ == "__main__":
    main()
