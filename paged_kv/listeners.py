"""What is called for each new pool. This file imports nothing, as `import paged_kv` loads it."""

TYPE_CHECKING = False  # as in paged_kv/__init__.py

if TYPE_CHECKING:
    from collections.abc import Callable

new_pool_listeners: "list[Callable[[], None]]" = []
"""Called, one at a time, for each new pool."""
