"""The rooms of paged_kv: which room may import which, and no import cycles."""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.folders import ROOT

# Folders beside paged_kv that install as its sub-packages.
INNER_ROOMS = ("allocator", "kernels", "integrations", "server")

# The rooms that each room may import, besides its own files; "" is paged_kv itself. The order is
# from the bottom up. A file can be a room of its own, below the others of its folder.
ROOMS = {
    "allocator": "",
    "allocator.prefixes": "allocator",
    "store": "allocator allocator.prefixes",
    "kernels.pages": "",
    "kernels.cpu": "kernels.pages",
    "kernels.gpu": "kernels.pages",
    "kernels": "kernels.cpu kernels.gpu kernels.pages",
    "offload": "allocator kernels.pages",
    "admission": "",
    "pool": "admission allocator allocator.prefixes kernels kernels.pages offload",
    "steps": ("allocator allocator.prefixes kernels kernels.pages offload pool"),
    "cache": "kernels.pages pool steps",
    "prefix": "allocator allocator.prefixes kernels.pages pool steps store",
    "monitor": "allocator pool",
    "trace": "kernels.pages pool prefix",
    "commands": "kernels kernels.cpu kernels.pages monitor pool store",
    "integrations.batching": (
        "admission allocator allocator.prefixes cache integrations.mlx_lm_internals "
        "kernels.pages pool prefix steps trace"
    ),
    "integrations.distributed": "allocator pool",
    "integrations.mlx_lm_internals": "allocator",
    "integrations.model_hooks": "",
    "integrations.heads": "cache integrations.model_hooks kernels.pages pool steps",
    "integrations.compiled": (
        "cache integrations.batching integrations.heads kernels kernels.pages pool steps"
    ),
    "integrations.states": (
        "cache integrations.batching integrations.mlx_lm_internals integrations.model_hooks "
        "kernels.pages pool steps"
    ),
    "integrations": (
        "allocator allocator.prefixes cache commands integrations.batching integrations.compiled "
        "integrations.distributed integrations.heads integrations.mlx_lm_internals "
        "integrations.model_hooks integrations.states kernels.pages pool prefix steps store trace"
    ),
    "integrations.mlx_vlm": (
        "cache integrations integrations.batching integrations.generation "
        "integrations.mlx_lm_internals integrations.model_hooks "
        "integrations.states kernels.pages steps"
    ),
    "integrations.servers": "commands integrations integrations.batching kernels.pages",
    "integrations.grammar": "integrations.mlx_lm_internals",
    "integrations.speculation": (
        "allocator allocator.prefixes cache commands integrations integrations.batching "
        "integrations.distributed integrations.grammar integrations.heads "
        "integrations.mlx_lm_internals integrations.states kernels.pages steps"
    ),
    "integrations.generation": (
        "allocator commands integrations integrations.batching integrations.distributed "
        "integrations.speculation pool store"
    ),
    "integrations.bench": (
        "cache commands integrations integrations.batching integrations.generation kernels "
        "kernels.pages steps"
    ),
    "integrations.plan": (
        "admission allocator cache commands integrations integrations.batching "
        "integrations.heads integrations.speculation kernels.pages pool"
    ),
    "integrations.doctor": (
        "commands integrations integrations.bench kernels kernels.cpu kernels.pages"
    ),
    "integrations.replay": (
        "admission allocator.prefixes commands integrations integrations.batching kernels.pages "
        "pool trace"
    ),
    "server.http": "",
    "server.options": "commands integrations pool server.http store",
    "server.engine": (
        "admission allocator allocator.prefixes commands integrations integrations.batching "
        "integrations.distributed integrations.grammar integrations.mlx_lm_internals "
        "integrations.speculation integrations.states kernels.pages prefix server.http "
        "server.options store"
    ),
    "server.completions": (
        "allocator.prefixes commands integrations integrations.batching integrations.grammar "
        "integrations.mlx_lm_internals kernels.pages prefix server.engine server.http "
        "server.options"
    ),
    "server.messages": "server.completions server.http server.options",
    "server.responses": "server.completions server.http server.options",
    "server": (
        "allocator commands integrations.distributed integrations.doctor monitor pool "
        "server.completions server.engine server.http server.messages server.options "
        "server.responses"
    ),
    "server.replicas": (
        "commands integrations integrations.distributed integrations.mlx_lm_internals server "
        "server.completions server.engine server.http server.messages server.options "
        "server.responses"
    ),
}
ARROWS = {room: set(others.split()) for room, others in ROOMS.items()}
# Files of paged_kv that every room may import, those of arrays and of integers only `lru`.
SMALL = {
    *("paged_kv.checks", "paged_kv.extras", "paged_kv.lru", "paged_kv.openblas"),
    *("paged_kv.options", "paged_kv.ranks", "paged_kv.__version__", "paged_kv.new_pool_listeners"),
}
KNOWS_NOTHING = ("allocator", "kernels")
# Files of paged_kv that name the rooms above them.
DOOR = ("__init__", "__main__", "command_line", "ray")


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yields the full dotted name of each import, at the top or in a function.

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


def modules() -> dict[str, Path]:
    """Every module of the project by its name without `paged_kv.`, through the linked rooms."""
    found = {}
    for path in sorted(ROOT.glob("*/**/*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[0] == "paged_kv" and parts[1] not in INNER_ROOMS:
            found[".".join(parts[1:])] = path
        elif parts[0] in INNER_ROOMS:
            found[".".join(parts)] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """The room of a module: for "kernels.gpu.kernels" it is "kernels.gpu"."""
    return module if module in ARROWS else module.rpartition(".")[0]


def target_of(name: str) -> str | None:
    """The module of the project that contains an imported name; None for other names."""
    parts = name.removeprefix("paged_kv.").split(".")
    heads = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((head for head in heads if head in MODULES), None)


def may_import(room: str, name: str) -> bool:
    """Whether a file of this room may import this absolute name."""
    first = name.partition(".")[0]
    if first in INNER_ROOMS:  # Importable only if Python starts in the checkout.
        return False
    if first == "mlx_lm":
        return room.startswith(("integrations", "server"))
    if first == "mlx" and room == "store":
        return False
    if first != "paged_kv":
        standard = first in sys.stdlib_module_names
        return not room.startswith("allocator") or standard or first == "sortedcontainers"
    if any(name == small or name.startswith(f"{small}.") for small in SMALL):
        return name == "paged_kv.lru.LRU" or room.split(".")[0] not in KNOWS_NOTHING
    target = target_of(name)
    return target is not None and room_of(target) in ARROWS[room] | {room}


def violations(room: str, source: str) -> list[str]:
    """The names that a file of this room with this source imports but may not."""
    return [
        name
        for name in imported_names(ast.parse(source))
        if name.startswith(".") or not may_import(room, name)
    ]


def test_imports_follow_the_arrows() -> None:
    found = {
        module: names
        for module, path in MODULES.items()
        if room_of(module) and (names := violations(room_of(module), path.read_text("utf-8")))
    }
    assert not found


def test_small_files_import_nothing_of_the_rooms_and_only_the_door_names_mlx_lms() -> None:
    for module, path in MODULES.items():
        if room_of(module):
            continue
        names = list(imported_names(ast.parse(path.read_text("utf-8"))))
        assert not [name for name in names if name.split(".")[0] in ("mlx_lm", *INNER_ROOMS)]
        if module not in DOOR:
            rooms = {room_of(target) for name in names if (target := target_of(name))}
            assert rooms <= {"", "kernels.pages"}, module


def test_arrows_do_not_go_in_a_circle_and_every_room_has_its_own() -> None:
    assert list(TopologicalSorter(ARROWS).static_order())
    assert {room_of(module) for module in MODULES} == {*ARROWS, ""}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports for types alone count too."""
    graph = {}
    for module, path in MODULES.items():
        targets = {target_of(name) for name in imported_names(_without_public_names(module, path))}
        graph[module] = targets - {None, module}
    assert list(TopologicalSorter(graph).static_order())


def _without_public_names(module: str, path: Path) -> ast.Module:
    """A file's imports, without those that show type checkers the names of the door."""
    tree = ast.parse(path.read_text("utf-8"))
    if module == "__init__":
        tree.body = [node for node in tree.body if not _is_for_types(node)]
    return tree


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize("room", INNER_ROOMS)
def test_linked_rooms_have_no_init(room: str) -> None:
    # With an __init__.py, the folder would hide an installed package of that name if Python starts
    # here.
    assert not (ROOT / room / "__init__.py").exists()


@pytest.mark.parametrize(
    ("room", "source", "name"),
    [
        ("allocator", "import numpy", "numpy"),
        ("allocator", "def f():\n    from mlx_lm import load", "mlx_lm.load"),
        ("allocator", "from paged_kv import *", "paged_kv.*"),
        ("kernels.pages", "import paged_kv.allocator.slabs", "paged_kv.allocator.slabs"),
        ("kernels", "from . import page", ".page"),
        ("kernels", "import paged_kv.checks", "paged_kv.checks"),
        ("store", "import mlx.core", "mlx.core"),
        ("pool", "import paged_kv.steps.sequence", "paged_kv.steps.sequence"),
        ("cache", "from kernels import page", "kernels.page"),
        ("cache", "__import__('mlx_lm.utils')", "mlx_lm.utils"),
    ],
)
def test_planted_violation_is_found(room: str, source: str, name: str) -> None:
    assert violations(room, f"import sys\n{source}\n") == [name]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("allocator", "import heapq\nfrom collections.abc import Iterable"),
        ("allocator", "from sortedcontainers import SortedSet"),
        ("allocator", "from paged_kv.allocator.errors import PoolExhausted"),
        ("store", "import numpy\nfrom paged_kv.store.keys import Link"),
        ("kernels", "import mlx.core as mx\nfrom paged_kv.kernels.gpu import text"),
        ("pool", "from paged_kv.allocator import slabs\nfrom paged_kv.checks import size_in_bytes"),
        ("integrations", "import mlx_lm\nfrom paged_kv.pool.page_pool import PagePool"),
    ],
)
def test_allowed_import_passes(room: str, source: str) -> None:
    assert violations(room, source) == []
