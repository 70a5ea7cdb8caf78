"""Makes the sources that the Python API in docs/api.md is read from; mkdocs.yml names this hook.

mkdocstrings reads a folder inside a package only if it has an `__init__.py`. The rooms of paged_kv
have none: CONTRIBUTING.md says why. So it reads a copy in which every folder has one.
"""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "docs" / "paged_kv"


def on_startup(**_: object) -> None:
    """Called by mkdocs before it builds."""
    shutil.rmtree(COPY, ignore_errors=True)
    # paged_kv/kernels and its like are links to the rooms beside it.
    for folder, _folders, names in os.walk(ROOT / "paged_kv", followlinks=True):
        copy = COPY / Path(folder).relative_to(ROOT / "paged_kv")
        copy.mkdir(parents=True)
        (copy / "__init__.py").touch()
        for name in names:
            if name.endswith(".py"):
                shutil.copy(Path(folder, name), copy / name)
