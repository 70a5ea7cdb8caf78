"""The models and factories that the state machine runs on."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paged_kv import PagedCacheFactory
from paged_kv.allocator.requantisation import OldestFirst
from paged_kv.kernels.pages.page_format import FormatName, page_format_named
from paged_kv.store.options import MIN_BYTES
from tests.support.state_machine.expected import Oracle, StockOracle, TableOracle
from tests.support.state_machine.rows import Formats
from tests.support.state_machine.table_model import TableModel
from tests.support.zoo import small_model

FORMATS: tuple[FormatName, ...] = ("auto", "fp16", "q8", "q4", ("q8", "q4"), ("fp16", "q8"))
# Bytes of a page of these models, in their own format of 32 bits.
PAGE_BYTES = 2 * 2 * 256 * 32 * 4


@dataclass(frozen=True)
class World:
    """The models and settings of one example of the machine.

    Attributes:
        name: of a model of the zoo, or "table".
        windows: what the layers of a table see, or the window of the zoo's model.
        has_states: whether a table has a recurrent layer.
        pages: that the budget holds, in their format.
        store: whether the factories share one.
    """

    name: str
    windows: tuple[int | None, ...]
    has_states: bool
    page_format: FormatName
    write_chunk: int | None
    pages: int
    store: bool

    @property
    def model(self) -> Any:
        return _model(self.name, self.windows, self.has_states)

    @property
    def oracle(self) -> Oracle:
        return TableOracle(self.model) if self.name == "table" else StockOracle(self.model)

    @property
    def formats(self) -> Formats:
        is_auto = self.page_format == "auto"
        return Formats("fp16" if is_auto else page_format_named(self.page_format).name, is_auto)

    def new_factory(self, folder: Path) -> PagedCacheFactory:
        options: dict[str, Any] = {"page_format": self.page_format}
        if self.page_format == "auto":
            # One recent page, not more: prompts here have only a few pages.
            options["page_format"] = OldestFirst(recent=1)
        if self.store:
            options |= {"store": folder, "store_bytes": MIN_BYTES}
        chunk = self.write_chunk
        if chunk is not None:
            chunk = min([chunk, *(window for window in self.windows if window is not None)])
        return PagedCacheFactory(
            self.model,
            max_bytes=int(self.pages * PAGE_BYTES * self._share),
            write_chunk=chunk,
            **options,
        )

    @property
    def _share(self) -> float:
        """How large a page is, of one of 32-bit floats, where some are written."""
        shares = {"fp16": 1.0, "q8": 0.6, "q4": 0.5}
        parts = self.formats.first.split("/")
        return (shares[parts[0]] + shares[parts[-1]]) / 2


@cache
def _model(name: str, windows: tuple[int | None, ...], has_states: bool) -> Any:
    if name == "table":
        return TableModel(windows, has_states)
    changes: dict[str, Any] = {"sliding_window": windows[0]} if windows else {}
    return small_model(name, **changes)
