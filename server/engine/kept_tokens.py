"""Keeps the tokens of the parts of chats: each turn repeats all but the end of the one before.

A text is cut where an added token begins that the chat template writes, such as <|im_start|>. The
tokenizers of Hugging Face look for the added tokens first, and normalise, split and merge what is
between two of them apart (`AddedVocabulary.extract_and_normalize` in tokenizers 0.23). So the
tokens of the parts are those of the whole.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from inspect import signature
from threading import Lock
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_kv.lru import LRU
from paged_kv.server.engine.template_roles import template_text

# A chat of 100,000 tokens takes about 1 MB.
MOST_BYTES = 1 << 25
# Of an entry, beside its text and its tokens.
_ENTRY_BYTES = 400
# Shorter parts go together: a call of a tokenizer costs as much as the tokens of 50 characters.
LEAST_CHARACTERS = 1000

# Other arguments of a chat template's call change how its text becomes tokens.
_OF_TEMPLATES = {
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "kwargs",
}
_PARAMETERS = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
_OF_TOKENS = _PARAMETERS.keys() - _OF_TEMPLATES
# Beside a border they would show that a tokenizer looks across it.
_NEIGHBOURS = ("", " ", "  ", "\n", "a", "a ", " a", "1", ".", "é", "\u0338", "▁", "界")


class KeptTokens:
    """The parts that were used last, with their tokens. Any thread may use it.

    Args:
        borders: finds the added tokens that begin a part.
        most_bytes: the memory for parts.
    """

    def __init__(self, borders: re.Pattern[str], most_bytes: int = MOST_BYTES) -> None:
        self._borders = borders
        self._kept: LRU[tuple[Hashable, str], array[int]] = LRU(most_bytes, _nbytes)
        self._lock = Lock()

    def parts(self, text: str, least: int = LEAST_CHARACTERS) -> Iterator[str]:
        """The parts of a text, each but the last of at least so many characters. Those of a longer
        text with the same beginning are the same, but for the last."""
        start = 0
        for found in self._borders.finditer(text):
            if found.start() - start >= least:
                yield text[start : found.start()]
                start = found.start()
        yield text[start:]

    def tokens(
        self, part: str, salt: Hashable, encode: Callable[[str], Iterable[int]]
    ) -> array[int]:
        """The tokens of a part.

        Args:
            salt: as of prompts: who has another cannot learn from the time that this takes whether
                somebody sent the same text.
            encode: makes them if they are not kept.
        """
        key = salt, part
        with self._lock:
            tokens = self._kept.use(key)
        if tokens is None:
            tokens = array("I", encode(part))
            with self._lock:
                self._kept[key] = tokens
        return tokens


def _nbytes(key: tuple[Hashable, str], tokens: array[int]) -> int:
    return sys.getsizeof(key[1]) + len(tokens) * tokens.itemsize + _ENTRY_BYTES


def kept_tokens_of(tokenizer: Any) -> KeptTokens | None:
    """What keeps the tokens of a tokenizer of mlx-lm; None if its texts have no place where they
    can be cut for certain."""
    inner = tokenizer._tokenizer
    if not _is_usual(tokenizer):
        return None
    added = inner.backend_tokenizer.get_added_tokens_decoder().values()
    written = list(inner.special_tokens_map.values())
    template = template_text(tokenizer)
    borders = [
        token.content
        for token in added
        if (token.content in written or token.content in template) and _is_border(token, added)
    ]
    if not borders:
        return None
    kept = KeptTokens(re.compile("|".join(map(re.escape, borders))))
    return kept if _proves(kept, inner, borders) else None


def only_renders(arguments: Iterable[str]) -> bool:
    """Whether arguments of `apply_chat_template` change only the text that it makes."""
    return _OF_TOKENS.isdisjoint(arguments)


def _is_usual(tokenizer: Any) -> bool:
    """Whether prompts are a template's text, and code of Hugging Face alone makes tokens of it."""
    inner = tokenizer._tokenizer
    names = ["_encode_plus"] + ["apply_chat_template"] * (tokenizer._chat_template is None)
    return (
        isinstance(inner, PreTrainedTokenizerFast)
        and all(getattr(type(inner), n) is getattr(PreTrainedTokenizerFast, n) for n in names)
        and not inner.split_special_tokens
    )


def _is_border(token: AddedToken, added: Iterable[AddedToken]) -> bool:
    """Whether texts can be cut before an added token, wherever they have it."""
    if token.normalized or token.lstrip or token.single_word:
        return False
    # Words and spaces behind another token decide whether it is one, and how far it goes.
    if re.match(r"[\w\s]", token.content):
        return False
    return not any(_hides(each.content, token.content) for each in added)


def _hides(other: str, text: str) -> bool:
    """Whether an added token may begin before another and end behind its beginning, or holds it."""
    ends = (other[at:] for at in range(1, len(other)))
    return (text in other and text != other) or any(map(text.startswith, ends))


def _proves(kept: KeptTokens, inner: Any, borders: Iterable[str]) -> bool:
    """Whether parts have the tokens of the whole, for texts made to show the opposite."""

    def encode(text: str) -> list[int]:
        tokens: list[int] = inner.encode(text, add_special_tokens=False)
        return tokens

    for border in borders:
        for text in ("".join(f"{each}{border}{each}" for each in _NEIGHBOURS), border, border * 2):
            parts = kept.parts(text, least=1)
            if [token for part in parts for token in encode(part)] != encode(text):
                return False
    return True
