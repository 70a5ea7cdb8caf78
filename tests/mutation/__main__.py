"""python -m tests.mutation [-k TEXT] [--list]: shows that the tests notice each mutant.

Fails if one survives without a reason, or does not fit the code any more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.mutation.checkout import Checkout
from tests.mutation.mutants import Mutant, all_mutants
from tests.mutation.verdicts import Judge
from tests.support.folders import ROOT

ISAS = (
    "from paged_kv.kernels.cpu.native_library import load_native_library as load; "
    "library, _ = load(); print(*(library.instruction_sets if library else ()))"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("-k", metavar="TEXT", default="", help="only mutants with it in their name")
    parser.add_argument("--list", action="store_true", help="name the mutants, and try none")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in all_mutants() if arguments.k in f"{mutant} ({mutant.file})"]
    if not mutants:
        parser.error(f"no mutant has {arguments.k!r} in its name or file; --list names them")
    if arguments.list:
        print(*mutants, sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="paged_kv-mutation-") as folder:
        return _try_all(mutants, Checkout(ROOT, Path(folder)))


def _try_all(mutants: list[Mutant], checkout: Checkout) -> int:
    found = checkout.says("import paged_kv; print(paged_kv.__file__)")
    assert Path(found).is_relative_to(checkout.root), f"tests would import {found}, not the copy"
    if any(mutant.needs_build for mutant in mutants):
        checkout.build()
    judge = Judge(checkout, checkout.says(ISAS).split())
    counts: Counter[str] = Counter()
    faults = 0
    for mutant in mutants:
        verdict = judge.judge(mutant)
        counts[verdict.outcome.value] += 1
        faults += verdict.is_fault
        print(f"{verdict.outcome.value:8} {verdict.seconds:6.1f} s  {mutant}", flush=True)
        if verdict.note:
            print(f"{'':20}{verdict.note}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if faults else 0


sys.exit(main())
