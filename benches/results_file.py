"""Writes the numbers of benches to files: one for each bench, machine and version of MLX."""

import json
import re
from pathlib import Path
from typing import Any

from paged_kv.integrations.bench.report import machine, versions

RESULTS = Path(__file__).with_name("results")


def write_result(bench: str, figures: dict[str, Any]) -> Path:
    """Write the figures of a bench beside what they were measured on, and say where; returns the
    file.

    The file is benches/results/<bench>-<chip>-<cores>-mlx-<version>.json, and a later run of the
    same bench on the same machine takes its place.
    """
    path, where, with_ = path_of(bench), machine(), versions()
    content = {"bench": bench, "machine": where, "versions": with_, "figures": figures}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(_with_lists_on_one_line(json.dumps(content, indent=2)) + "\n")
    print("written to", path.name, flush=True)
    return path


def _with_lists_on_one_line(text: str) -> str:
    """Put each list of numbers or names on a line of its own. No string holds a line break."""
    return re.sub(
        r"\[\n\s*([^\[\]{}]*?)\n\s*\]",
        lambda found: "[" + re.sub(r",\n *", ", ", found[1]) + "]",
        text,
    )


def latest_figures(bench: str) -> dict[str, Any]:
    """The figures that such a run wrote last on this machine; none if there was none."""
    path = path_of(bench)
    found: dict[str, Any] = json.loads(path.read_text())["figures"] if path.exists() else {}
    return found


def path_of(bench: str) -> Path:
    """The file of a bench's figures on this machine and with these versions."""
    name = f"{bench} {machine()['chip']} {machine()['cores']} mlx {versions()['mlx']}"
    return RESULTS / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.json"
