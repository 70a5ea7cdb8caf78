"""How `paged-kv store` prints what it found and did."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paged_kv.sizes import counted, format_size

if TYPE_CHECKING:
    from paged_kv.store.maintenance import Transfer
    from paged_kv.store.page_store import Finding


def print_findings(findings: Sequence[Finding]) -> None:
    """What is wrong, a line each."""
    for finding in findings:
        print(f"{finding.name}: {finding.problem} ({format_size(finding.nbytes)})")


def print_transfer(arguments: argparse.Namespace, verb: str, done: Transfer) -> int:
    """What was transferred and skipped; returns 1 if something was skipped."""
    if arguments.json:
        print_json(asdict(done))
    else:
        print(f"{counted(done.entries, 'entry')} {verb}, {format_size(done.nbytes)}")
        for reason, count in Counter(done.skipped.values()).items():
            print(f"{count} skipped: {reason}", file=sys.stderr)
    return 1 if done.skipped else 0


def print_json(value: Any) -> int:
    """A value as JSON; returns 0."""
    print(json.dumps(value, indent=2))
    return 0
