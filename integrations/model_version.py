"""Numbers the versions of a model, so that pages of one version are not reused by another, and
identifies them by their content.

A version is everything that a model's results depend on: its arrays, its modules and their classes,
and every number and text in them and in their settings, such as rope bases and scales. Adapters are
a part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain, count
from threading import Lock
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from xxhash import xxh3_128

from paged_kv.integrations.compiled.recording import containers, has_attributes, values
from paged_kv.integrations.model_trial import NOTED_POSITIONS
from paged_kv.lru import LRU

ATTACHED = "paged_kv_factory"
"""The attribute in which a model holds what `use_pages` made for it: a function, of which no step
consists."""

# Arrays of up to so many bytes are kept, to be compared with their replacements.
SMALL = 1 << 20
# Versions that are known again when they come back: adapters that take turns, say.
MOST_KNOWN = 16
# Attributes of modules that change no result.
_ASIDE = frozenset({"_no_grad", ATTACHED, *NOTED_POSITIONS})


class ModelVersion:
    """The version of a model. All methods may be called from any thread.

    An array that was not replaced counts as unchanged: do not write into arrays in place. Some
    models replace a small array by an equal one whenever they run; small arrays are compared by
    content.

    Attributes:
        model: the model.
        latest: the number of the version that it had when somebody asked last.
    """

    latest: int

    def __init__(self, model: Module) -> None:
        self.model = model
        self._lock = Lock()
        self._numbers = count()
        self._hashes: dict[int, tuple[weakref.ref[mx.array], str]] = {}
        self._identities: dict[int, tuple[str, str]] = {}
        self._known: LRU[int, _Version] = LRU(MOST_KNOWN)
        self._look()

    @property
    def number(self) -> int:
        """The number of the present version: a new one, or that of an equal one of the latest
        `MOST_KNOWN`. O(arrays and settings)."""
        with self._lock:
            now = self._parts()
            if len(now) != len(self._seen) or not all(map(_is_same, self._seen, now)):
                self._look()
            return self.latest

    def identity(self, number: int) -> tuple[str, str] | None:
        """The hashes of a version's arrays and of all else, the same in every process; None if it
        is not the present one and was never asked for. O(bytes of arrays not hashed before)."""
        is_present = number == self.number
        with self._lock:
            if is_present and number not in self._identities:
                self._identities[number] = self._hashed()
            return self._identities.get(number)

    def _look(self) -> None:
        """Find the present version among those that are known, or add it."""
        self._containers = containers(self.model)
        self._seen = [*map(_seen, self._parts())]
        arrays, settings = contents(self.model)
        known = (each for each in self._known.values() if each.is_of(arrays, settings))
        now = next(known, None) or _Version(next(self._numbers), settings, {})
        # Arrays that are equal to those of before take their places.
        seen = {name: _seen(array) for name, array in arrays.items()}
        for gone, _ in self._known.put(now.number, now._replace(arrays=seen)):
            self._identities.pop(gone, None)
        self.latest = now.number

    def _parts(self) -> list[Any]:
        """Arrays, settings and modules, as they are now, and the classes of these."""
        held = self._containers
        return [*map(type, held), *chain.from_iterable(map(values, held))]

    def _hashed(self) -> tuple[str, str]:
        arrays, settings = contents(self.model)
        alive = {at: known for at, known in self._hashes.items() if known[0]() is not None}
        self._hashes = alive
        weights = sha256()
        for path, array in arrays.items():
            if id(array) not in self._hashes:
                self._hashes[id(array)] = weakref.ref(array), _hash_of(array)
            _, known = self._hashes[id(array)]
            weights.update(f"{path}\0{array.dtype}\0{array.shape}\0{known}\0".encode())
        return weights.hexdigest(), settings


Seen = Any  # a weak reference where it is a large array


class _Version(NamedTuple):
    """What a version consists of: the hash of its settings, and its arrays by path."""

    number: int
    settings: str
    arrays: dict[str, Seen]

    def is_of(self, arrays: dict[str, mx.array], settings: str) -> bool:
        return (
            settings == self.settings
            and arrays.keys() == self.arrays.keys()
            and all(_is_same(self.arrays[name], array) for name, array in arrays.items())
        )


def _seen(part: Any) -> Seen:
    return weakref.ref(part) if isinstance(part, mx.array) and part.nbytes > SMALL else part


def _is_same(seen: Seen, part: Any) -> bool:
    if seen is part:
        return True
    if isinstance(seen, weakref.ref):
        return seen() is part
    if isinstance(seen, mx.array) and isinstance(part, mx.array):
        return seen.dtype == part.dtype and bool(mx.array_equal(seen, part))
    return False


def identity_of(model: Module) -> tuple[str, str]:
    """The hashes of a model's arrays, and of its other content. O(bytes)."""
    version = ModelVersion(model)
    identity = version.identity(version.number)
    assert identity is not None
    return identity


def contents(model: Module) -> tuple[dict[str, mx.array], str]:
    """A model's arrays by path, and a hash of all else."""
    arrays, settings = {}, sha256()
    for path, leaf in _leaves(model, "", set()):
        if isinstance(leaf, mx.array):
            arrays[path] = leaf
        else:
            settings.update(f"{path}\0{leaf}\0".encode())
    return arrays, settings.hexdigest()


def _leaves(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Arrays, and the text of all other values, each with its path."""
    match value:
        case mx.array() | None | bool() | int() | float() | str():
            yield path, value if isinstance(value, mx.array) else repr(value)
            return
    yield path, f"{type(value).__module__}.{type(value).__qualname__}"
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple):
        named = [(str(at), each) for at, each in enumerate(value)]
    else:
        own = [*dict.items(value)] if isinstance(value, dict) else []
        own += vars(value).items() if has_attributes(value) else []
        parts = [(str(name), each) for name, each in own if name not in _ASIDE]
        named = sorted(parts, key=lambda each: each[0])
    for name, child in named:
        yield from _leaves(child, f"{path}.{name}", seen)


def _hash_of(array: mx.array) -> str:
    """A hash of an array's bytes."""
    whole = mx.contiguous(array if array.ndim else array.reshape(1)).view(mx.uint8)
    mx.eval(whole)
    # MLX's arrays have the buffer protocol, but their types do not declare it.
    content: Any = whole
    return xxh3_128(memoryview(content)).hexdigest() if whole.size else ""
