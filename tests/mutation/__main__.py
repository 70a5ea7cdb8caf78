"""python -m tests.mutation: shows that the tests notice faults of the code.

Tries the mutants of the lists, then some that are drawn at random. With --seed it tries only the
draw of that seed. Fails if a mutant survives, or does not fit the code any more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

from tests.mutation.checkout import Checkout
from tests.mutation.generated import draw
from tests.mutation.mutants import Mutant, listed_mutants
from tests.mutation.verdicts import Judge
from tests.support.folders import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("-k", metavar="TEXT", default="", help="only with it in file or name")
    parser.add_argument("--seed", type=int, help="of the draw; the day's if left out")
    parser.add_argument("--count", type=int, default=30, help="how many to draw; default: 30")
    parser.add_argument("--list", action="store_true", help="name the mutants, and try none")
    arguments = parser.parse_args()
    listed = [] if arguments.seed is not None else listed_mutants()
    seed = arguments.seed if arguments.seed is not None else date.today().toordinal()
    drawn = draw(seed, arguments.count, arguments.k)
    print(f"drawn with --seed {seed} --count {arguments.count}: {len(drawn)}", flush=True)
    mutants = [*(mutant for mutant in listed if arguments.k in str(mutant)), *drawn]
    if not mutants:
        parser.error(f"no mutant has {arguments.k!r} in its file or name; --list names them")
    if arguments.list:
        print(*mutants, sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="paged_kv-mutation-") as folder:
        return _try_all(mutants, Checkout(ROOT, Path(folder)))


def _try_all(mutants: list[Mutant], checkout: Checkout) -> int:
    found = checkout.python("-c", "import paged_kv; print(paged_kv.__file__)")
    assert Path(found).is_relative_to(checkout.root), f"tests would import {found}, not the copy"
    judge = Judge(checkout)
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
