"""The command `paged-kv bench`: mlx-lm's caches beside pages, on this machine."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from paged_kv.options import embedded_model, examples, name, path, require_writable

if TYPE_CHECKING:
    from paged_kv.integrations.bench.comparisons import BenchSizes, Outcome


def add_bench_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="compare mlx-lm's caches with pages on this machine and a model",
        description="Times mlx-lm's caches and pages in turns: decoding, prefill, a fork, a shared "
        "prefix, and memory. It stops by itself within about three minutes, and says where the "
        "machine was too busy to tell.",
        **examples(
            "paged-kv bench",
            "paged-kv bench --model mlx-community/Llama-3.2-1B-Instruct-4bit --json bench.json",
            "paged-kv bench --quick --plot bench.svg",
        ),
    )
    parser.add_argument(
        "--model",
        type=name,
        help="folder or Hugging Face repository of a model (default: the small one in this "
        "package)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="shorter contexts, within about a minute"
    )
    parser.add_argument("--json", type=path, metavar="FILE", help="write a report")
    parser.add_argument(
        "--plot", type=path, metavar="OUT", help="plot the ratios to a .svg, .png or .pdf"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # Imported here because loading mlx-lm takes seconds.
    from paged_kv.integrations.bench import report
    from paged_kv.integrations.bench.comparisons import QUICK, WHOLE

    for file in filter(None, (arguments.json, arguments.plot)):
        require_writable(file)
    if arguments.plot:
        report.require_drawable(arguments.plot)
    content, outcomes = measured(arguments.model, QUICK if arguments.quick else WHOLE)
    print(report.as_table(content, outcomes), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    if arguments.plot:
        report.draw(content, outcomes, arguments.plot)
    return 0


def measured(model: str | None, sizes: BenchSizes) -> tuple[dict[str, Any], list[Outcome]]:
    """Compare both kinds of caches.

    Args:
        model: folder or Hugging Face repository; None for the embedded model.

    Returns:
        the report, ready for JSON, and what was measured.
    """
    from paged_kv.integrations.bench import report
    from paged_kv.integrations.bench.comparisons import Bench
    from paged_kv.integrations.generation.text_generation import loaded
    from paged_kv.integrations.paged_cache_factory import PagedCacheFactory

    language_model = loaded(model or embedded_model())[0]
    with closing(PagedCacheFactory(language_model)) as factory:
        outcomes = Bench(language_model, factory, sizes).outcomes()
        found = list(tqdm(outcomes, desc="compared", leave=False, disable=None))
        backend = factory.stats().backend
    return report.as_dict(model or "stdlib-llama", backend, found), found
