"""Remembers in the cache folder what has passed a trial here."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from paged_kv.kernels.pages.verdicts import verdict_file


class PassedTrials:
    """What has passed the trials of one kind.

    Args:
        name: of the file, beside that of the kernels' verdicts.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __contains__(self, tried: str) -> bool:
        return tried in self._read()

    def add(self, tried: str) -> None:
        """Remember that something passed. Without the file, the next process tries it again."""
        file = self._file()
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps([*self._read(), tried]))
            temporary.replace(file)

    def _read(self) -> list[str]:
        """All that passed; nothing where the file cannot be read."""
        try:
            return [str(each) for each in json.loads(self._file().read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def _file(self) -> Path:
        return verdict_file().with_name(self._name)
