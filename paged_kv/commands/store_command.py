"""The command `paged-kv store`: lists, verifies and cleans up stored pages. It needs no model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from paged_kv.checks import counted, format_size
from paged_kv.options import examples, path
from paged_kv.store.options import StoreOptions, default_folder, parse_address, store_size, tier

if TYPE_CHECKING:
    from paged_kv.store.blob_store import BlobStore, Finding

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
    _add(commands, "list", "list the entries, most recently used first", run_list, ("ls",))
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
    with _opened(arguments) as store:
        blobs = list(store.entries())[::-1]
    times = [blob.used_ns / 1e9 for blob in blobs if blob.used_ns]
    amount = f"{arguments.store}: {_amount([blob.nbytes for blob in blobs])}"
    lines = [amount, f"  used from {_day(times[-1])} to {_day(times[0])}"] if times else [amount]
    content = [
        {"name": blob.name, "nbytes": blob.nbytes, "last_used": blob.used_ns / 1e9}
        for blob in blobs
    ]
    return _print(arguments, content, lines)


def run_verify(arguments: argparse.Namespace) -> int:
    """Read every entry; return 1 if anything is wrong."""
    from paged_kv.store.blob_store import verify

    with _opened(arguments) as store:
        entries, findings = verify(store)
    content = {"entries": entries, "findings": [asdict(each) for each in findings]}
    read = f"{counted(entries, 'entry')} read, {counted(len(findings), 'fault')} found"
    _print(arguments, content, [*map(_finding, findings), read])
    return 1 if findings else 0


def run_gc(arguments: argparse.Namespace) -> int:
    from paged_kv.store.blob_store import gc

    with _opened(arguments) as store:
        removed = gc(store, arguments.store_bytes)
    total = _amount([each.nbytes for each in removed], "removed")
    content = [asdict(each) for each in removed]
    return _print(arguments, content, [*map(_finding, removed), total])


def run_clear(arguments: argparse.Namespace) -> int:
    from paged_kv.store.blob_store import clear

    with _opened(arguments) as store:
        sizes = clear(store, dry_run=arguments.dry_run)
    verb = "would be removed" if arguments.dry_run else "removed"
    content = {"entries": len(sizes), "nbytes": sum(sizes), "dry_run": arguments.dry_run}
    return _print(arguments, content, [_amount(sizes, verb)])


def _add(
    commands: Subparsers,
    name: str,
    meaning: str,
    run: Callable[[argparse.Namespace], int],
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
    parser.set_defaults(run=run, store_bytes=NO_LIMIT)
    return parser


def _opened(arguments: argparse.Namespace) -> closing[BlobStore]:
    """The folder, or the server at an address with its secret, that the arguments name.

    Raises:
        ValueError: a server lacks a secret, or a package is missing.
        OSError: there is no store in the folder, or the server fails.
    """
    from paged_kv.store.folder_store import TAG, FolderStore
    from paged_kv.store.tiered_store import open_blobs, read_seal

    place = arguments.store
    if isinstance(place, str):
        secret, unauthenticated = arguments.store_secret, arguments.store_unauthenticated
        options = StoreOptions(secret=secret, unauthenticated=unauthenticated)
        return closing(open_blobs(parse_address(place), read_seal(options)))
    if not (place / TAG).exists():
        raise FileNotFoundError(
            f"there is no page store in {place}: name with --store the folder that the store was "
            "made in"
        )
    # Listing and cleaning up need no free disk space.
    return closing(FolderStore(place, arguments.store_bytes, min_free_bytes=0))


def _amount(sizes: Sequence[int], verb: str = "") -> str:
    return f"{counted(len(sizes), 'entry')} {verb}".rstrip() + f", {format_size(sum(sizes))}"


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _finding(finding: Finding) -> str:
    return f"{finding.name}: {finding.problem} ({format_size(finding.nbytes)})"


def _print(arguments: argparse.Namespace, content: Any, lines: Sequence[str]) -> int:
    """Print a result as JSON or as lines; returns 0."""
    print(*[json.dumps(content, indent=2)] if arguments.json else lines, sep="\n")
    return 0
