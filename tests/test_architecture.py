"""The imports between the rooms point down only, and are spelled from the top."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Installed as sub-packages of paged_kv, although they stand beside it.
INNER_ROOMS = ("allocator", "kernels", "integrations")
ROOMS = (*INNER_ROOMS, "paged_kv")
# The modules of paged_kv that may name the room above them.
DOOR = ("__init__.py", "__main__.py", "command_line.py")
# What knows files and bytes, and neither arrays nor pools: its threads must never touch those.
BYTES_ONLY = "store/"


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yields the full dotted name of everything that is imported, at the top or in a function.

    A relative name keeps its leading dots, and ``from a import b`` is ``a.b``, as b may be a
    module. Names given as a literal to ``import_module`` or ``__import__`` count too.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                start = "." * level + (f"{module}." if module else "")
                yield from (start + alias.name for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def is_within(name: str, *packages: str) -> bool:
    """Whether the module is one of the packages or lies in one: paged_kv.x lies in paged_kv."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def may_import(room: str, file_name: str, name: str) -> bool:
    """Whether a file of this room may import what has this absolute name."""
    if is_within(name, *INNER_ROOMS):  # reached only where Python starts in the checkout
        return False
    if is_within(name, "mlx_lm"):
        return room == "integrations"
    if room == "allocator":
        standard = name.partition(".")[0] in sys.stdlib_module_names
        return standard or is_within(name, "sortedcontainers", "paged_kv.allocator")
    if room == "kernels":
        return not is_within(name, "paged_kv") or is_within(name, "paged_kv.kernels")
    if room == "paged_kv" and file_name.startswith(BYTES_ONLY):
        ours = is_within(name, "paged_kv.store", "paged_kv.allocator")
        return ours or not is_within(name, "paged_kv", "mlx")
    if room == "paged_kv":
        return file_name in DOOR or not is_within(name, "paged_kv.integrations")
    return True


def violations(room: str, source: str, file_name: str = "module.py") -> list[str]:
    """Returns the names that a file with this path inside this room may not import."""
    return [
        name
        for name in imported_names(ast.parse(source))
        if name.startswith(".") or not may_import(room, file_name, name)
    ]


def room_files(room: str) -> list[Path]:
    """Returns the Python files of a room; those of paged_kv without the rooms linked into it."""
    links = [ROOT / "paged_kv" / inner for inner in INNER_ROOMS]
    return [
        path
        for path in sorted((ROOT / room).rglob("*.py"))
        if not any(path.is_relative_to(link) for link in links)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room: str) -> None:
    found = {}
    for path in room_files(room):
        file_name = path.relative_to(ROOT / room).as_posix()
        if names := violations(room, path.read_text(encoding="utf-8"), file_name):
            found[str(path.relative_to(ROOT))] = names
    assert not found


@pytest.mark.parametrize("room", INNER_ROOMS)
def test_inner_rooms_have_no_init(room: str) -> None:
    # With one, the folder hides an installed package of that name from a Python started here.
    assert not (ROOT / room / "__init__.py").exists()


def test_every_room_is_looked_at() -> None:
    # A renamed folder would otherwise pass by having no files.
    assert all((ROOT / room).is_dir() for room in ROOMS)
    assert ROOT / "paged_kv" / "__init__.py" in room_files("paged_kv")


@pytest.mark.parametrize(
    ("room", "source", "name"),
    [
        ("allocator", "import mlx.core as mx", "mlx.core"),
        ("allocator", "import numpy", "numpy"),
        ("allocator", "def f():\n    from mlx_lm import load", "mlx_lm.load"),
        ("allocator", "from paged_kv.kernels import page", "paged_kv.kernels.page"),
        ("allocator", "from paged_kv import kernels", "paged_kv.kernels"),
        ("allocator", "import paged_kv", "paged_kv"),
        ("allocator", "from paged_kv import *", "paged_kv.*"),
        ("allocator", "import paged_kv.allocator_tools", "paged_kv.allocator_tools"),
        ("kernels", "from paged_kv.allocator.slabs import Slabs", "paged_kv.allocator.slabs.Slabs"),
        ("kernels", "import paged_kv.pool", "paged_kv.pool"),
        ("kernels", "if True:\n    import mlx_lm.models.base", "mlx_lm.models.base"),
        ("kernels", "from .page import Page", ".page.Page"),
        ("kernels", "from . import page", ".page"),
        ("paged_kv", "from mlx_lm.models import cache", "mlx_lm.models.cache"),
        ("paged_kv", "from paged_kv.integrations import hook", "paged_kv.integrations.hook"),
        ("paged_kv", "from paged_kv import integrations", "paged_kv.integrations"),
        ("paged_kv", "import allocator.slabs", "allocator.slabs"),
        ("paged_kv", "from kernels import page", "kernels.page"),
        ("paged_kv", "import importlib\nimportlib.import_module('mlx_lm')", "mlx_lm"),
        ("paged_kv", "__import__('mlx_lm.utils')", "mlx_lm.utils"),
        ("integrations", "from ..allocator import slabs", "..allocator.slabs"),
        ("integrations", "import integrations.hook", "integrations.hook"),
    ],
)
def test_planted_violation_is_found(room: str, source: str, name: str) -> None:
    assert violations(room, f"import sys\n{source}\n") == [name]


def test_the_store_knows_bytes_only() -> None:
    source = (
        "import numpy\nfrom paged_kv.store.keys import Link\n"
        "from paged_kv.allocator.errors import PagedKVError\n"
        "import mlx.core\nfrom paged_kv.page_pool import PagePool\n"
    )
    found = violations("paged_kv", source, f"{BYTES_ONLY}folder.py")
    assert found == ["mlx.core", "paged_kv.page_pool.PagePool"]
    assert any(path.parent.name == "store" for path in room_files("paged_kv"))


@pytest.mark.parametrize("file_name", DOOR)
def test_the_door_may_name_integrations_but_not_mlx_lm(file_name: str) -> None:
    source = "from paged_kv.integrations.factory import PagedCacheFactory\nimport mlx_lm\n"
    assert violations("paged_kv", source, file_name) == ["mlx_lm"]
    # A file of the same name further in is not the door.
    assert len(violations("paged_kv", source, f"sub/{file_name}")) == 2


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("allocator", "import heapq\nfrom collections.abc import Iterable"),
        ("allocator", "from sortedcontainers import SortedSet"),
        ("allocator", "from paged_kv.allocator.errors import PoolExhausted"),
        ("allocator", "from paged_kv import allocator"),
        ("kernels", "import mlx.core as mx\nimport numpy as np\nimport paged_kv.kernels.page"),
        ("paged_kv", "from paged_kv.allocator import slabs\nfrom paged_kv.kernels import page"),
        ("integrations", "import mlx_lm\nfrom paged_kv.pool import PagePool"),
    ],
)
def test_allowed_import_passes(room: str, source: str) -> None:
    assert violations(room, source) == []
