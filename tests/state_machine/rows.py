"""The expected content of one sequence of a batch."""

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from paged_kv.pool.window import Window

Chain = tuple[str, ...]
"""The page formats that held a token, one after the other."""

# The formats that "auto" requantises pages to.
SMALLER = {"fp16": ("q8", "q4"), "q8": ("q4",)}
# A page that is written again has 16 bits, so a token may be quantised any number of times. More
# times change no more than what is allowed.
MOST_QUANTISED = 3


@dataclass(frozen=True)
class Formats:
    """The formats that pages of a factory may have had.

    Attributes:
        first: the format that full pages get.
        is_auto: whether they become smaller when memory gets short.
    """

    first: str
    is_auto: bool = False

    @property
    def of_new_tokens(self) -> frozenset[Chain]:
        return self.since(frozenset({("fp16",)}), self.first)

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
        formats: of the factory.
        new: the chains that a token written now may get.
        full: the format of full pages; None if it is not known, as with "auto".
        tokens: all that the sequence holds.
        chains: for each of them, what its page may have been so far.
        written: in each layer, the most tokens that there ever were.
    """

    formats: Formats
    new: frozenset[Chain]
    full: str | None
    tokens: list[int] = field(default_factory=list)
    chains: list[frozenset[Chain]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    @classmethod
    def begun(
        cls, formats: Formats, written: abc.Sequence[int], tokens: abc.Sequence[int] = ()
    ) -> "Row":
        full = None if formats.is_auto else formats.first
        row = cls(formats, formats.of_new_tokens, full, written=list(written))
        row.add(tokens)
        return row

    def add(self, tokens: abc.Sequence[int]) -> None:
        self.tokens += tokens
        self.chains += [self.new] * len(tokens)
        self.written = [max(each, len(self.tokens)) for each in self.written]

    def trim(self, count: int) -> None:
        length = max(0, len(self.tokens) - count)
        del self.tokens[length:], self.chains[length:]
        self.written = [each if self.tokens else 0 for each in self.written]

    def copy(self) -> "Row":
        tokens, chains, written = list(self.tokens), list(self.chains), list(self.written)
        return Row(self.formats, self.new, self.full, tokens, chains, written)

    def convert(self, name: str, *, is_whole: bool) -> None:
        """Note a conversion. If it ran out of memory, nobody knows which pages it converted."""

        known = {chains: self.formats.converted(chains, name) for chains in set(self.chains)}
        self.chains = [known[chains] for chains in self.chains]
        new = self.formats.since(frozenset({("fp16",)}), name)
        self.new = new if is_whole else self.new | new
        self.full = name if is_whole and not self.formats.is_auto else None

    @property
    def is_found(self) -> bool:
        """Whether a lookup may find it: the index keeps a sequence under its format only if it was
        never converted."""
        return self.new == self.formats.of_new_tokens

    def rollback(self, windows: Mapping[int, Window]) -> int:
        """The most tokens that can be trimmed in layers with these windows."""
        shortest = [
            window.shortest_rollback(self.written[layer]) for layer, window in windows.items()
        ]
        return max(0, len(self.tokens) - max(shortest, default=0))
