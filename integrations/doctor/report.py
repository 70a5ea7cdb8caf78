"""Writes one file with all that an issue needs."""

from __future__ import annotations

import io
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_kv.commands.arguments import require_writable
from paged_kv.integrations.bench.bench_command import measured
from paged_kv.integrations.bench.comparisons import QUICK
from paged_kv.integrations.bench.report import as_table
from paged_kv.integrations.doctor.examination import examine, known


def write_report(file: Path) -> int:
    """Examine the kernels, run a quick bench of the embedded model, and write all that was found,
    the versions and the log to a Markdown file.

    Args:
        file: the file to write.

    Returns:
        1 if a kernel was wrong, else 0.

    Raises:
        OSError: the file cannot be written; raised before anything runs.
    """
    require_writable(file)
    _, before = known(verbose=True)
    with _logged() as log:
        each = examine()
        are_right, found = known(verbose=False)
        print(found)
        content, outcomes = measured(None, QUICK)
        benched = as_table(content, outcomes)
        print(benched, end="")
    sections = {
        "paged-kv doctor": found,
        "Each check": "\n".join(each),
        "What was known before": before,
        "paged-kv bench --quick": benched,
        "Log": log.getvalue(),
        "Bench as JSON": json.dumps(content, indent=2),
    }
    file.write_text(anonymous("\n".join(map(_section, sections.keys(), sections.values()))))
    print(f"wrote {file}: please look through it, and attach it to an issue")
    return 0 if are_right else 1


def anonymous(text: str) -> str:
    """The text without the names of the user's folders."""
    folders = {
        os.getcwd(): ".",
        tempfile.gettempdir(): "$TMPDIR",
        os.path.expanduser("~"): "~",
    }
    for folder in sorted(folders, key=len, reverse=True):
        if folder != os.sep:
            text = text.replace(folder, folders[folder])
    return text


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```\n{text.rstrip()}\n```\n"


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    """What paged_kv logs within, from the level "debug"."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("paged_kv")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # for the file, not for the terminal
    try:
        yield text
    finally:
        logger.level, logger.propagate = before
        logger.removeHandler(handler)
