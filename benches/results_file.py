"""Writes the numbers of benches to files: one for each bench, machine and version of MLX."""

import json
import re
from pathlib import Path
from typing import Any

from paged_kv.integrations.bench.machine import machine, versions

RESULTS = Path(__file__).with_name("results")


def write_result(bench: str, figures: dict[str, Any]) -> Path:
    """Write the figures of a bench beside what they were measured on; returns the file.

    The file is benches/results/<bench>-<chip>-<cores>-mlx-<version>.json, and a later run of the
    same bench on the same machine takes its place.
    """
    where, with_ = machine(), versions()
    name = f"{bench} {where['chip']} {where['cores']} mlx {with_['mlx']}"
    path = RESULTS / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.json"
    content = {"bench": bench, "machine": where, "versions": with_, "figures": figures}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
