"""The command `paged-kv store`: lists, verifies and cleans up stored pages. It needs no model."""

from __future__ import annotations

import argparse
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paged_kv.commands.arguments import examples, path
from paged_kv.sizes import counted, format_size
from paged_kv.store.folder import TAG, default_folder
from paged_kv.tiers.store_options import StoreOptions, store_size, tier

if TYPE_CHECKING:
    from paged_kv.store.index import Row
    from paged_kv.store.page_store import Finding

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

NO_LIMIT = (1 << 63) - 1


def add_store_parser(subparsers: Subparsers) -> None:
    """Register the subcommand "store"."""
    parser = subparsers.add_parser(
        "store",
        help="list, verify and clean up pages on disk",
        description="Manages a folder of pages that --store of other commands names.",
        **examples(
            "paged-kv store list",
            "paged-kv store verify --store /data/pages",
            "paged-kv store gc --store-bytes 20GB",
            "paged-kv store verify --store redis://192.168.1.7 --store-secret FILE",
        ),
    )
    commands = parser.add_subparsers(dest="store_command", required=True, metavar="COMMAND")
    meaning = "list the entries, most recently used first"
    _add(commands, "list", meaning, run_list, aliases=("ls",))
    _add(commands, "verify", "read every file; name faults and exit with status 1", run_verify)
    gc = _add(commands, "gc", "remove damaged entries, and those over a cap", run_gc)
    gc.add_argument(
        "--store-bytes",
        type=store_size,
        default=NO_LIMIT,
        metavar="SIZE",
        help="evict least recently used entries until at most this is left, such as 50GB",
    )
    clear = _add(commands, "clear", "remove all pages; other files stay", run_clear)
    clear.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run_list(arguments: argparse.Namespace) -> int:
    """List the entries."""
    with _opened(arguments) as place:
        if isinstance(arguments.store, str):
            found = dict(place.blobs.names())
            content = [{"name": name, "nbytes": nbytes} for name, nbytes in found.items()]
            return _print(arguments, content, [_amount(arguments, list(found.values()))])
        rows = place.rows()
    groups = [
        f"  {model}, {page_format}, {part}: {_summary(theirs)}"
        for (model, page_format, part), theirs in _grouped(rows).items()
    ]
    lines = [f"{arguments.store}: {_summary(rows)}", *groups]
    return _print(arguments, [asdict(row) for row in rows], lines)


def run_verify(arguments: argparse.Namespace) -> int:
    """Read every entry; return 1 if anything is wrong."""
    from paged_kv.tiers.maintenance import verify

    with _opened(arguments) as place:
        entries, findings = verify(place)
    content = {"entries": entries, "findings": [asdict(each) for each in findings]}
    read = f"{counted(entries, 'entry')} read, {counted(len(findings), 'fault')} found"
    _print(arguments, content, [*map(_finding, findings), read])
    return 1 if findings else 0


def run_gc(arguments: argparse.Namespace) -> int:
    """Remove entries that cannot be used, and those over the cap."""
    from paged_kv.tiers.maintenance import gc

    with _opened(arguments) as place:
        removed = gc(place, arguments.store_bytes)
    total = _amount(arguments, [each.nbytes for each in removed], "removed")
    content = [asdict(each) for each in removed]
    return _print(arguments, content, [*map(_finding, removed), total])


def run_clear(arguments: argparse.Namespace) -> int:
    """Remove all pages."""
    from paged_kv.tiers.maintenance import clear

    with _opened(arguments) as place:
        sizes = clear(place, dry_run=arguments.dry_run)
    verb = "would be removed" if arguments.dry_run else "removed"
    content = {"files": len(sizes), "nbytes": sum(sizes), "dry_run": arguments.dry_run}
    return _print(arguments, content, [_amount(arguments, sizes, verb)])


def _add(
    commands: Subparsers,
    name: str,
    meaning: str,
    run: Callable[[argparse.Namespace], int],
    *,
    aliases: Sequence[str] = (),
) -> argparse.ArgumentParser:
    description = f"{meaning.capitalize()}."
    parser = commands.add_parser(name, aliases=aliases, help=meaning, description=description)
    parser.add_argument(
        "--store",
        type=tier,
        default=default_folder(),
        metavar="PLACE",
        help=f"the folder of pages, or a server such as redis://HOST (default: {default_folder()})",
    )
    parser.add_argument(
        "--store-secret", type=path, metavar="FILE", help="the secret of entries on servers"
    )
    parser.add_argument(
        "--store-unauthenticated", action="store_true", help="servers have no secret"
    )
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    parser.set_defaults(run=lambda arguments: _run(run, arguments), store_bytes=NO_LIMIT)
    return parser


def _run(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except sqlite3.Error as error:
        raise OSError(f"the index of {arguments.store} cannot be used: {error}") from None


@contextmanager
def _opened(arguments: argparse.Namespace) -> Iterator[Any]:
    """The `PageStore` of a folder, or the `Server` at an address.

    Raises:
        ValueError: a server lacks a secret, or a package is missing.
        OSError: there is no store in the folder, or the server fails.
    """
    from paged_kv.store.page_store import PageStore
    from paged_kv.tiers.maintenance import opened_server

    place = arguments.store
    if isinstance(place, str):
        options = StoreOptions(
            secret=arguments.store_secret, unauthenticated=arguments.store_unauthenticated
        )
        with opened_server(place, options) as server:
            yield server
        return
    if not (place / TAG).exists():
        raise FileNotFoundError(
            f"there is no page store in {place}: name with --store the folder that the store was "
            "made in"
        )
    # Listing and cleaning up need no free disk space.
    with PageStore(place, arguments.store_bytes, min_free_bytes=0) as store:
        yield store


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.page_format, row.part), []).append(row)
    return groups


def _summary(rows: Sequence[Row]) -> str:
    tokens = sum(row.num_tokens for row in rows)
    nbytes = format_size(sum(row.nbytes for row in rows))
    return f"{counted(len(rows), 'entry')}, {counted(tokens, 'token')}, {nbytes}"


def _amount(arguments: argparse.Namespace, sizes: Sequence[int], verb: str = "") -> str:
    """How many files or entries there are, and their bytes."""
    noun = "entry" if isinstance(arguments.store, str) else "file"
    return f"{counted(len(sizes), noun)} {verb}".rstrip() + f", {format_size(sum(sizes))}"


def _finding(finding: Finding) -> str:
    return f"{finding.name}: {finding.problem} ({format_size(finding.nbytes)})"


def _print(arguments: argparse.Namespace, content: Any, lines: Sequence[str]) -> int:
    """Print a result as JSON or as lines; returns 0."""
    print(*[json.dumps(content, indent=2)] if arguments.json else lines, sep="\n")
    return 0
