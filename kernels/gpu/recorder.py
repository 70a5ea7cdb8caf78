"""Lets a GPU backend's launches be recorded.

The launches of a step and their order are the same whether they are recorded or not: a stand-in
runs the same code. It has arrays of `mx.compile` in the place of slabs, which kernels write in
place, and of the token that kernels wait for.
"""

from collections.abc import Hashable
from threading import get_ident

import mlx.core as mx

from paged_kv.kernels.gpu.arrays import bound_slabs
from paged_kv.kernels.gpu.backend import GpuBackend
from paged_kv.kernels.gpu.order import Chain
from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.tables import Tables


class GpuRecorder:
    """See `StepRecorder` for the operations."""

    pays = True

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._order = backend.order

    def key(self, pages: LayerPages, tables: Tables) -> Hashable:
        bound = pages.memo.get(tables.slabs) or bound_slabs(pages, tables.slabs)
        return bound.kind, bound.count

    def arrays(self, pages: LayerPages, tables: Tables) -> list[mx.array]:
        bound = pages.memo.get(tables.slabs) or bound_slabs(pages, tables.slabs)
        return [*bound.handles, self._order.latest(pages)]

    def stand_in(self, pages: LayerPages, tables: Tables, arrays: list[mx.array]) -> LayerPages:
        *handles, token = arrays
        read_tokens = pages.read_tokens
        stand_in = LayerPages(pages.geometry, self._backend, pages.slab_stride, read_tokens)
        stand_in.slabs = pages.slabs
        stand_in.memo[tables.slabs] = bound_slabs(pages, tables.slabs).standing_for(handles)
        stand_in.kept = Chain(token, get_ident())
        return stand_in

    def changes(self, tables: Tables) -> int:
        return 1

    def changed(self, stand_in: LayerPages, tables: Tables) -> list[mx.array]:
        return [self._order.latest(stand_in)]

    def keep(
        self, pages: LayerPages, tables: Tables, changed: list[mx.array], filled: list[int]
    ) -> None:
        (token,) = changed
        self._order.follow(pages, token)
        if pages.geometry.has_summaries:
            self._backend.summarise(pages, filled)
