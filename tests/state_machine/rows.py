"""The expected content of one sequence of a batch."""

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

from paged_kv.pool.window import Window

Chain = tuple[str, ...]
"""The page formats that held a token, one after the other."""

# The formats that "auto" requantises pages to.
SMALLER = {"fp16": ("q8", "q4"), "q8": ("q4",)}


@dataclass(frozen=True)
class Formats:
    """The formats that pages of a factory may have had.

    Attributes:
        first: the format that they begin with.
        is_auto: whether they become smaller when memory gets short.
    """

    first: str
    is_auto: bool = False

    @property
    def of_new_tokens(self) -> frozenset[Chain]:
        return self.with_smaller(frozenset({(self.first,)}))

    def with_smaller(self, chains: frozenset[Chain]) -> frozenset[Chain]:
        """These chains, and those that they may have become since."""
        if not self.is_auto:
            return chains
        more = {(*chain, name) for chain in chains for name in SMALLER.get(chain[-1], ())}
        return chains if more <= chains else self.with_smaller(chains | more)

    def converted(self, chains: frozenset[Chain], name: str) -> frozenset[Chain]:
        """The chains after a conversion of the pages."""
        return self.with_smaller(
            frozenset(chain if chain[-1] == name else (*chain, name) for chain in chains)
        )


@dataclass(eq=False)
class Row:
    """The tokens of a sequence, and the known facts about its pages.

    Attributes:
        formats: the factory's formats.
        new: the chains of a token that is written now.
        tokens: the tokens that the sequence holds.
        chains: for each token, the formats that its page may have had.
        written: in each layer, the most tokens that it ever had.
    """

    formats: Formats
    new: frozenset[Chain]
    tokens: list[int] = field(default_factory=list)
    chains: list[frozenset[Chain]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    @classmethod
    def begun(
        cls, formats: Formats, written: abc.Sequence[int], tokens: abc.Sequence[int] = ()
    ) -> "Row":
        row = cls(formats, formats.of_new_tokens, written=list(written))
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
        return Row(self.formats, self.new, tokens, chains, written)

    def convert(self, name: str, *, is_whole: bool) -> None:
        """Note a conversion. If it ran out of memory, nobody knows which pages it converted."""

        def after(chains: frozenset[Chain]) -> frozenset[Chain]:
            converted = self.formats.converted(chains, name)
            return converted if is_whole else chains | converted

        known = {chains: after(chains) for chains in set(self.chains)}
        self.chains = [known[chains] for chains in self.chains]
        new = self.formats.with_smaller(frozenset({(name,)}))
        # The last page keeps its format while it fills up.
        self.new = new if is_whole else self.new | new

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
