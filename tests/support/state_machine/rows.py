"""The expected content of one sequence of a batch."""

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from paged_kv.kernels.pages.page_format import PAGE_SIZE
from paged_kv.pool.layer_kinds import Window
from tests.support.full_pages import full_format

Chain = tuple[str, ...]
"""The page formats that held a token, one after the other."""

WRITTEN: frozenset[Chain] = frozenset({("fp16",)})
"""The chain of a token that was never in a quantised page."""

# The formats that "auto" requantises pages to.
SMALLER = {"fp16": ("q8", "q4"), "q8": ("q4",)}
# A page that is written again has 16 bits, so a token may be quantised any number of times. More
# times change no more than what is allowed.
MOST_QUANTISED = 3


@dataclass(frozen=True)
class Formats:
    """The format that full pages of a factory get, and whether they become smaller when memory
    gets short."""

    first: str
    is_auto: bool = False

    def since(self, chains: frozenset[Chain], full: str) -> frozenset[Chain]:
        """These chains, and those that they may have become since, where full pages get a format:
        full ones get it, and are 16 bits again if they are written."""
        return _closure(chains, full, self.is_auto)

    def converted(self, chains: frozenset[Chain], name: str) -> frozenset[Chain]:
        """What they may be once full pages were turned into another format."""
        full = {(*chain, name) for chain in chains if chain[-1] != name}
        return self.since(chains | full, name)


@cache
def _closure(chains: frozenset[Chain], full: str, is_auto: bool) -> frozenset[Chain]:
    more = {
        (*chain, name)
        for chain in chains
        for name in {full, "fp16", *(SMALLER.get(chain[-1], ()) if is_auto else ())}
        if name != chain[-1] and (name == "fp16" or chain[-1] == "fp16" or name != full)
    }
    short = {chain for chain in more if len(chain) - chain.count("fp16") <= MOST_QUANTISED}
    return chains if short <= chains else _closure(chains | short, full, is_auto)


@dataclass(eq=False)
class Row:
    """The tokens of a sequence, and the known facts about its pages.

    Attributes:
        full_formats: what full pages may get.
        chains: for each token, what its page may have been so far. A page that was full before a
            trim may have been quantised then.
        written: in each layer, the most tokens that there ever were.
        rewritten: the numbers of pages that were full, and trimmed and written again.
    """

    formats: Formats
    full_formats: frozenset[str]
    tokens: list[int] = field(default_factory=list)
    chains: list[frozenset[Chain]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    rewritten: frozenset[int] = frozenset()

    @classmethod
    def begun(
        cls,
        formats: Formats,
        written: abc.Sequence[int],
        tokens: abc.Sequence[int] = (),
        rewritten: frozenset[int] = frozenset(),
    ) -> "Row":
        row = cls(formats, frozenset({formats.first}), written=list(written), rewritten=rewritten)
        row.add(tokens)
        if row.full_tokens // PAGE_SIZE in rewritten:
            row._fill(slice(row.full_tokens, None))
        return row

    @property
    def full(self) -> str | None:
        """The format of full pages; None if it is not known, as with "auto"."""
        is_known = len(self.full_formats) == 1 and not self.formats.is_auto
        return next(iter(self.full_formats)) if is_known else None

    @property
    def full_tokens(self) -> int:
        return len(self.tokens) // PAGE_SIZE * PAGE_SIZE

    def add(self, tokens: abc.Sequence[int]) -> None:
        before = self.full_tokens
        self.tokens += tokens
        self.chains += [WRITTEN] * len(tokens)
        # With "auto" a page that a step has only reserved may be requantised too.
        end = len(self.tokens) if self.formats.is_auto else self.full_tokens
        self._fill(slice(before, end))
        self.written = [max(each, len(self.tokens)) for each in self.written]

    def trim(self, count: int) -> None:
        was_full, length = self.full_tokens, max(0, len(self.tokens) - count)
        del self.tokens[length:], self.chains[length:]
        self.written = [each if self.tokens else 0 for each in self.written]
        if self.full_tokens < length < was_full:
            self.rewritten |= {length // PAGE_SIZE}
        self.rewritten = frozenset(page for page in self.rewritten if page * PAGE_SIZE < length)

    def copy(self) -> "Row":
        return replace(
            self, tokens=list(self.tokens), chains=list(self.chains), written=list(self.written)
        )

    def convert(self, name: str, *, is_whole: bool) -> None:
        """Note a conversion. If it ran out of memory, nobody knows which pages it converted."""
        end = len(self.tokens) if self.formats.is_auto else self.full_tokens
        for page, tokens in _first_and_others(slice(0, end)):
            full = full_format(name, page)
            known = {c: self.formats.converted(c, full) for c in set(self.chains[tokens])}
            self.chains[tokens] = [known[chains] for chains in self.chains[tokens]]
        self.full_formats = frozenset({name}) | (frozenset() if is_whole else self.full_formats)

    @property
    def is_found(self) -> bool:
        """Whether a lookup may find it: the index keeps a sequence under its format only if it was
        never converted."""
        return self.full_formats == {self.formats.first}

    def _fill(self, tokens: slice) -> None:
        for page, part in _first_and_others(tokens):
            names = {full_format(name, page) for name in self.full_formats}
            known = {
                chains: frozenset[Chain]().union(
                    *(self.formats.since(chains, name) for name in names)
                )
                for chains in set(self.chains[part])
            }
            self.chains[part] = [known[chains] for chains in self.chains[part]]

    def rollback(self, windows: Mapping[int, Window]) -> int:
        """The most tokens that can be trimmed in layers with these windows."""
        shortest = [
            window.shortest_rollback(self.written[layer]) for layer, window in windows.items()
        ]
        return max(0, len(self.tokens) - max(shortest, default=0))


def _first_and_others(tokens: slice) -> list[tuple[int, slice]]:
    """Those of the tokens that are in the first page, and the others, each with its first page."""
    start, end = tokens.start, tokens.stop
    others = slice(max(start, PAGE_SIZE), end)
    if start >= PAGE_SIZE:
        return [(1, others)]
    first = slice(start, PAGE_SIZE if end is None else min(end, PAGE_SIZE))
    return [(0, first), (1, others)]
