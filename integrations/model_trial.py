"""Runs a model symbolically to find out what it does with keys and values.

Most layers pass the arrays of `update_and_fetch` to attention only, and then the arrays need not be
computable. The trial finds these layers without a list of models: it runs a prompt, a token after
it, and both in a batch with padding, on mlx-lm's own caches. The graph then shows which layers'
keys and values a result depends on. Steps of one token are told apart: latent attention expands the
latents of longer ones. Nothing is computed.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from paged_kv.integrations.attention_hook import this_thread
from paged_kv.integrations.batching.prompt_caches import leaves
from paged_kv.integrations.cache_library import model_file
from paged_kv.integrations.states.one_by_one import row_of
from paged_kv.kernels.pages.page_format import LayerGeometry
from paged_kv.pool.layer_kinds import AppendedRows
from paged_kv.steps.read import PagedKeys, PagedValues
from paged_kv.steps.recognised_arrays import new_placeholder

logger = logging.getLogger("paged_kv")

PROMPT, SHORTER = 5, 3
# Where mlx-vlm's models keep the positions of a prompt with images.
NOTED_POSITIONS = ("_position_ids", "_rope_deltas")


@dataclass
class Trial:
    """The result of a trial.

    Attributes:
        geometries: the shapes and dtypes that each layer writes.
        attending: the layers whose keys and values only attention reads.
        attending_in_decode: the same for steps of one token.
        in_order: whether attention reads each of these layers before the next one writes.
        prepares: whether the model does anything with keys and values that only replaced operations
            of MLX recognise; true where that is not known.
    """

    geometries: dict[int, LayerGeometry] = field(default_factory=dict)
    attending: frozenset[int] = frozenset()
    attending_in_decode: frozenset[int] = frozenset()
    in_order: bool = False
    prepares: bool = True

    def add_layer(self, layer: int, geometry: LayerGeometry) -> None:
        """Add a layer whose keys and values only attention reads."""
        self.geometries[layer] = geometry
        self.attending |= {layer}
        self.attending_in_decode |= {layer}


class _Writes(NamedTuple):
    """The writes of one layer in steps of one kind."""

    layer: int
    is_decode: bool


class _Arrays:
    """The stand-in arrays of all layers."""

    def __init__(self) -> None:
        self.trial = Trial()
        # Each write and each read by attention, in order.
        self.written_and_read: list[_Writes] = []
        self._numbers: dict[tuple[_Writes, mx.Dtype], mx.array] = {}

    def of(
        self, writes: _Writes, keys: mx.array, values: mx.array
    ) -> tuple[PagedKeys, PagedValues]:
        """Stand-ins of the same shapes that cannot be computed."""
        stands = []
        for each in (keys, values):
            if (key := (writes, each.dtype)) not in self._numbers:
                self._numbers[key] = new_placeholder(each.dtype)
            stands.append(mx.broadcast_to(self._numbers[key], each.shape))
        found = PagedKeys(stands[0]), PagedValues(stands[1])
        read: Any = _TriedRead(lambda: self.written_and_read.append(writes), keys, values)
        found[0].read = found[1].read = read
        self.written_and_read.append(writes)
        return found

    def find(self, results: Iterable[mx.array]) -> None:
        """Find the layers whose arrays the results depend on."""
        names = {f"of_{at}": writes for at, (writes, _) in enumerate(self._numbers)}
        graph = io.StringIO()
        arrays = dict(zip(names, self._numbers.values(), strict=True))
        mx.export_to_dot(graph, *results, **arrays)
        used = {writes for name, writes in names.items() if f'"{name}" ->' in graph.getvalue()}
        trial, layers = self.trial, frozenset(self.trial.geometries)
        trial.attending = layers - {layer for layer, _ in used}
        trial.attending_in_decode = layers - {layer for layer, is_decode in used if is_decode}
        order = [
            each
            for each in self.written_and_read
            if each.layer in (trial.attending_in_decode if each.is_decode else trial.attending)
        ]
        trial.in_order = order[::2] == order[1::2]


class _TriedRead:
    """Takes the place of a lazy read of pages, for the attention hook."""

    def __init__(self, note: Callable[[], None], keys: mx.array, values: mx.array) -> None:
        self._note, self._gathered = note, (keys, values)

    def attend(
        self,
        queries: mx.array,
        mask: Any,
        position_queries: mx.array | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> mx.array:
        self._note()
        if position_queries is not None or softcap is not None:
            this_thread.prepares = True
        latents, values = self._gathered
        dim = (values if position_queries is None else latents).shape[3]
        return mx.broadcast_to(queries[..., :1], (*queries.shape[:3], dim))

    def gather_tokens(self, indices: mx.array, *, of_values: bool) -> mx.array:
        keys, values = self._gathered
        given = values if of_values else keys
        if not of_values:
            self._note()
        return mx.broadcast_to(
            given[:, :, :1], (*given.shape[:2], indices.shape[1], given.shape[3])
        )

    def gather(self) -> tuple[mx.array, mx.array]:
        return self._gathered


class _TriedCache:
    """Wraps an mlx-lm cache that pages will replace."""

    def __init__(self, stock: Any, layer: int, arrays: _Arrays) -> None:
        self._stock, self._layer, self._arrays = stock, layer, arrays

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values"):
            this_thread.prepares = True  # what models do with these
        return getattr(self._stock, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedValues]:
        self._arrays.trial.geometries[self._layer] = LayerGeometry.of(keys, values)
        writes = _Writes(self._layer, is_decode=keys.shape[2] == 1)
        return self._arrays.of(writes, *self._stock.update_and_fetch(keys, values))

    def merge(self, caches: list[_TriedCache]) -> _TriedCache:
        stock = self._stock.merge([cache._stock for cache in caches])
        return _TriedCache(stock, self._layer, self._arrays)


def trial_of_rows(rows: Mapping[int, AppendedRows]) -> Trial:
    """The result for layers that append rows: all are known, and nothing else reads their pages."""
    layers = frozenset(rows)
    geometries = {layer: each.geometry for layer, each in rows.items()}
    return Trial(geometries, attending=layers, attending_in_decode=layers)


def try_out(model: Module, new_cache: Callable[[Callable[[Any], Any]], list[Any]]) -> Trial:
    """Run the trial of a model.

    `new_cache(wrap)` makes an mlx-lm prompt cache, with `wrap(cache)` in the place of each cache
    that will be paged.
    """
    arrays = _Arrays()
    trial = arrays.trial

    def tried_cache() -> list[Any]:
        layers = count()
        made = new_cache(lambda stock: _TriedCache(stock, next(layers), arrays))
        return row_of(made, 0)

    this_thread.prepares = False
    call: Any = model  # its call has no types
    noted = {name: getattr(model, name) for name in NOTED_POSITIONS if hasattr(model, name)}
    try:
        cache = tried_cache()
        results: list[mx.array] = []
        for tokens in (PROMPT, 1):
            results += _results(call(mx.zeros((1, tokens), mx.int32), cache=cache), cache)
        try:
            results += _in_a_batch(model, tried_cache(), tried_cache())
        except Exception as error:  # mlx-lm's caches cannot batch some models either
            logger.info("a batch cannot be tried out: %r", error)
    except Exception as error:  # models raise anything; gathering works for any model
        name = model_file(model)
        logger.warning("%s cannot be tried out, so keys and values are gathered: %r", name, error)
        return trial
    finally:
        for name, value in noted.items():
            setattr(model, name, value)
    arrays.find(results)
    trial.prepares = this_thread.prepares
    return trial


def _in_a_batch(model: Any, first: list[Any], second: list[Any]) -> list[mx.array]:
    cache = [mine.merge([mine, other]) for mine, other in zip(first, second, strict=True)]
    for each in cache:
        each.prepare(lengths=[PROMPT, SHORTER], right_padding=[0, PROMPT - SHORTER])
    results = [*_results(model(mx.zeros((2, PROMPT), mx.int32), cache=cache), cache)]
    for each in cache:
        each.finalize()
    return [*results, *_results(model(mx.zeros((2, 1), mx.int32), cache=cache), cache)]


def _results(output: Any, cache: Iterable[Any]) -> Iterator[mx.array]:
    """The output of a step, and the states that it left in caches that are not paged."""
    yield from _arrays_in(getattr(output, "logits", output))
    for each in leaves(cache):
        if not isinstance(each, _TriedCache):
            yield from _arrays_in(each.state)


def _arrays_in(tree: Any) -> list[mx.array]:
    flat: Any = tree_flatten([tree])
    return [leaf for _, leaf in flat if isinstance(leaf, mx.array)]
