"""Defines how a backend takes part in recorded steps: see paged_kv/steps/recorded.py."""

from collections.abc import Hashable
from typing import Protocol

import mlx.core as mx

from paged_kv.kernels.pages.layer_pages import LayerPages
from paged_kv.kernels.pages.tables import Tables


class StepRecorder(Protocol):
    """Lets `mx.compile` record what a backend does in a step of one token per sequence.

    A recording holds no number that changes from step to step. It takes these as arrays, for each
    layer those of `arrays`, and returns the layer's `changed` ones.
    """

    @property
    def pays(self) -> bool:
        """Whether recorded steps are quicker as far as is known."""
        ...

    def key(self, pages: LayerPages, tables: Tables) -> Hashable:
        """All that operations on a layer depend on besides its arrays. Equal keys have arrays of
        equal shapes and dtypes."""
        ...

    def arrays(self, pages: LayerPages, tables: Tables) -> list[mx.array]:
        """The arrays of a layer that a step reads, writes or waits for.

        Raises:
            ThreadConflict: another thread has yet to compute them.
        """
        ...

    def stand_in(self, pages: LayerPages, tables: Tables, arrays: list[mx.array]) -> LayerPages:
        """Pages like a layer's, with other arrays in the place of its own."""
        ...

    def changes(self, tables: Tables) -> int:
        """How many arrays `changed` returns."""
        ...

    def changed(self, stand_in: LayerPages, tables: Tables) -> list[mx.array]:
        """The arrays of a stand-in that its operations have replaced."""
        ...

    def keep(
        self, pages: LayerPages, tables: Tables, changed: list[mx.array], filled: list[int]
    ) -> None:
        """Let a layer have these arrays, after a recorded step that has filled the pages of these
        table entries: summarise them, if pages have summaries. A recording does not know them."""
        ...
