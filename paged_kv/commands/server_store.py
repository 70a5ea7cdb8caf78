"""`paged-kv store` for tiers on servers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paged_kv.commands.printed import print_findings, print_json, print_transfer
from paged_kv.sizes import counted, format_size

if TYPE_CHECKING:
    from paged_kv.store.page_store import PageStore
    from paged_kv.tiers.maintenance import Server


def run_list(arguments: argparse.Namespace) -> int:
    """Count the entries."""
    with opened_server(arguments.store, arguments) as server:
        found = list(server.blobs.names())
    if arguments.json:
        return print_json([{"name": name, "nbytes": nbytes} for name, nbytes in found])
    nbytes = format_size(sum(nbytes for _, nbytes in found))
    print(f"{counted(len(found), 'entry')}, {nbytes}")
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Read every entry; return 1 if anything is wrong."""
    from paged_kv.tiers.maintenance import verify

    with opened_server(arguments.store, arguments) as server:
        entries, findings = verify(server)
    if arguments.json:
        print_json({"entries": entries, "findings": [asdict(each) for each in findings]})
    else:
        print_findings(findings)
        print(f"{counted(entries, 'entry')} read, {counted(len(findings), 'fault')} found")
    return 1 if findings else 0


def run_gc(arguments: argparse.Namespace) -> int:
    """Remove entries that cannot be used, and those over the cap."""
    from paged_kv.tiers.maintenance import gc

    with opened_server(arguments.store, arguments) as server:
        removed = gc(server, arguments.store_bytes)
    if arguments.json:
        return print_json([asdict(each) for each in removed])
    print_findings(removed)
    nbytes = format_size(sum(each.nbytes for each in removed))
    print(f"{counted(len(removed), 'entry')} removed, {nbytes}")
    return 0


def run_clear(arguments: argparse.Namespace) -> int:
    """Remove all entries of this package."""
    with opened_server(arguments.store, arguments) as server:
        found = list(server.blobs.names())
        if not arguments.dry_run:
            server.blobs.remove([name for name, _ in found])
    nbytes = sum(nbytes for _, nbytes in found)
    if arguments.json:
        told = {"files": len(found), "nbytes": nbytes, "dry_run": arguments.dry_run}
        return print_json(told)
    verb = "would be removed" if arguments.dry_run else "removed"
    print(f"{counted(len(found), 'entry')} {verb}, {format_size(nbytes)}")
    return 0


def run_copy(arguments: argparse.Namespace) -> int:
    """Copy all entries of one tier to another; return 1 if some were skipped."""
    from paged_kv.tiers.maintenance import copy

    with ExitStack() as stack:
        source = stack.enter_context(_opened(arguments.store, arguments))
        target = stack.enter_context(_opened(arguments.target, arguments))
        done = copy(source, target)
    return print_transfer(arguments, "copied", done)


@contextmanager
def opened_server(place: str, arguments: argparse.Namespace) -> Iterator[Server]:
    """The server at an address, with the secret of the options.

    Raises:
        ValueError: there is no secret, or a package is missing.
        OSError: the server fails.
    """
    from paged_kv.tiers.address import parse_address
    from paged_kv.tiers.maintenance import Server
    from paged_kv.tiers.opening import open_blobs, read_seal
    from paged_kv.tiers.store_options import StoreOptions

    options = StoreOptions(
        secret=arguments.store_secret, unauthenticated=arguments.store_unauthenticated
    )
    address = parse_address(place)
    assert not isinstance(address, Path), "the caller knows that this is a server"
    blobs = open_blobs(address)
    try:
        yield Server(blobs, read_seal(options))
    finally:
        blobs.close()


@contextmanager
def _opened(place: str | Path, arguments: argparse.Namespace) -> Iterator[PageStore | Server]:
    from paged_kv.store.page_store import PageStore

    if isinstance(place, str):
        with opened_server(place, arguments) as server:
            yield server
    else:
        with PageStore(place, arguments.store_bytes) as store:
            yield store
