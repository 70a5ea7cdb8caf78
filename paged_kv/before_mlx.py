"""Loads OpenBLAS when a process that has imported paged_kv imports MLX, which then takes it."""

import sys

# As in __init__.py.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class _BeforeMLX:
    """A finder of modules that finds none, and learns what is imported."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None, /
    ) -> None:
        if fullname == "mlx.core":
            from paged_kv.openblas import load_openblas

            load_openblas()


def await_mlx() -> None:
    """Have OpenBLAS loaded before MLX is imported, if it is: it takes time and threads, and much of
    paged_kv does without MLX."""
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        sys.meta_path.insert(0, _BeforeMLX())
