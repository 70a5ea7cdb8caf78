"""Draws the pictures of the documents: python -m benches.pictures

A pool is filled as by a server, and requantises its pages: prompts with common prefixes, continued
for a while, some of them forked, most of them dropped but cached. The picture of `paged-kv stats
--watch` goes to docs/pictures/watch.svg, that of `--plot` to docs/pictures/plot.svg.
"""

import copy
import gc
import io
import os
import random
import re
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.terminal_theme import MONOKAI

from paged_kv import PagedKVCache, PagePool, Sequence
from paged_kv.kernels.pages.page_format import page_format_named
from paged_kv.monitor.processes import ProcessView
from paged_kv.monitor.publisher import view_process
from paged_kv.monitor.stats_plot import draw
from paged_kv.monitor.stats_table import screen
from paged_kv.prefix.prefix_cache import PrefixCache

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
MAX_BYTES = 12 << 20
COLUMNS, LINES = 96, 48


def main() -> None:
    os.environ["PAGED_KV_PUBLISH"] = "0"  # Not when tests import this: they show processes.
    PICTURES.mkdir(exist_ok=True)
    pool = PagePool(2, page_format="auto", max_bytes=MAX_BYTES, name="llama")
    held = Conversations(pool)
    views = [_view(pool, 0)]
    for second in range(1, 401):
        held.go_on()
        views.append(_view(pool, second))
    (PICTURES / "watch.svg").write_text(watch_picture(views[-1]))
    held.rows.clear()
    gc.collect()
    draw([*views, _view(pool, 401)], PICTURES / "plot.svg")


def _view(pool: PagePool, second: int) -> ProcessView:
    pool.stats()  # releases the blocks of collected sequences
    command = "paged-kv server --model llama --max-kv-bytes 12MiB"
    return ProcessView(71, command, second, view_process([pool]).pools)


class Conversations:
    """Sequences that come, grow, fork and go."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._prefixes = PrefixCache(pool, has_states=False)
        self._random = random.Random(1)
        self.rows: list[tuple[list[int], list[PagedKVCache]]] = []

    def go_on(self) -> None:
        """One thing happens."""
        choice = self._random.random()
        if choice < 0.45 or len(self.rows) < 3:
            self._begin()
        elif choice < 0.6:
            self.rows.append(copy.deepcopy(self._random.choice(self.rows)))
        elif choice < 0.85:
            self._write(self._random.choice(self.rows)[1], self._random.randrange(40, 200))
        else:
            self.rows.pop(self._random.randrange(len(self.rows)))
        if self._random.random() < 0.02:
            del self.rows[: len(self.rows) // 2]
        while len(self.rows) > 44:
            self.rows.pop(0)
        gc.collect()

    def _begin(self) -> None:
        system = [self._random.randrange(3)] * 700
        own = [self._random.randrange(100) for _ in range(self._random.randrange(20, 900))]
        tokens = system + own
        known = self._prefixes.fetch("", tokens, page_format_named("fp16"))
        sequence = known.sequence if known else Sequence(self._pool)
        layers = range(self._pool.num_layers)
        caches = [PagedKVCache(self._pool, layer, [sequence]) for layer in layers]
        self._write(caches, len(tokens) - (known.num_tokens if known else 0))
        self._prefixes.insert("", tokens, sequence, None)
        self.rows.append((tokens, caches))

    def _write(self, caches: list[PagedKVCache], count: int) -> None:
        numbers = mx.zeros((1, 1, count, 32), dtype=mx.float16)
        for cache in caches:
            cache.batch.append(cache.layer, numbers, numbers)


def watch_picture(view: ProcessView) -> str:
    """What the terminal shows, without the fonts that rich would load from elsewhere."""
    console = Console(
        record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True
    )
    console.print(screen(view, console))
    svg = console.export_svg(title="paged-kv stats --watch", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    main()
