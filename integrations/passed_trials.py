"""Remembers in the cache folder what has passed a trial here."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path


class PassedTrials:
    """What has passed the trials of one kind.

    Args:
        name: of the file in the folder paged-kv of $XDG_CACHE_HOME, or of ~/.cache.
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
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(caches) / "paged-kv" / self._name
