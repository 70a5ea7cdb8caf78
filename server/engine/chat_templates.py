"""What the chat template of a model allows: which roles messages may have, and where the text of a
chat can be cut, so that each turn makes tokens only of its end.

Some templates refuse instructions behind the first message, or drop them without a word.

A text is cut where an added token begins that the template writes, such as <|im_start|>. The
tokenizers of Hugging Face look for the added tokens first, and normalise, split and merge what is
between two of them apart (`AddedVocabulary.extract_and_normalize` in tokenizers 0.23). So the
tokens of the parts are those of the whole.
"""

from __future__ import annotations

import inspect
import re
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from threading import Lock
from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_kv.kernels.pages.errors import warn_once
from paged_kv.lru import LRU

Messages = list[dict[str, Any]]
Form = Callable[[Sequence[Any]], Messages]


def merged(messages: Sequence[Any]) -> Messages:
    """The same conversation with one system message, its first. Later ones are the user's, in their
    places: at the beginning they would change the prefix with every turn."""
    leading = list(takewhile(_instructs, messages))
    first = [reduce(_joined, leading)] if leading else []
    return first + marked(messages[len(leading) :])


def marked(messages: Sequence[Any]) -> Messages:
    """The same conversation without system messages: their texts are marked ones of the user's."""
    shown: Messages = []
    was_marked = False
    for message in messages:
        is_marked = _instructs(message)
        if is_marked:
            content = _content("<system>\n", message.get("content"), "\n</system>")
            message = {"role": "user", "content": content}
        # Many templates want the user and the assistant in turns.
        if (is_marked or was_marked) and shown and shown[-1]["role"] == message["role"] == "user":
            shown[-1] = _joined(shown[-1], message)
        else:
            shown.append(message)
        was_marked = is_marked
    return shown


def _instructs(message: Any) -> bool:
    return message["role"] in ("system", "developer")


def _joined(first: Any, second: Any) -> dict[str, Any]:
    return {**first, "content": _content(first.get("content"), "\n\n", second.get("content"))}


def _content(*contents: Any) -> Any:
    """Contents as one: a text, or parts if any of them has parts."""
    if not any(isinstance(each, list) for each in contents):
        return "".join(each or "" for each in contents)
    parts: list[Any] = []
    for each in contents:
        if each:
            parts += [{"type": "text", "text": each}] if isinstance(each, str) else each
    return parts


# What a template must show of a conversation, in a form that it takes.
_PROBE = [
    {"role": "system", "content": "First instruction."},
    {"role": "system", "content": "Second instruction."},
    {"role": "user", "content": "Only question."},
    {"role": "system", "content": "Last instruction."},
]


@dataclass(frozen=True)
class TemplateRoles:
    """Which roles a chat template takes, and where."""

    form: Form | None  # changes a conversation that the template refuses; None if it takes all
    names_developer: bool  # whether it tells the messages of developers from those of the system

    def fitted(self, messages: Sequence[Any], names: Mapping[str, Any]) -> Messages:
        """A conversation as the template takes it; `names` are a request's own for the roles."""
        if not (self.names_developer or "developer" in names):
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        if self.form is None:
            return list(messages)
        fitted = self.form(messages)
        if fitted != messages:
            warn_once(
                "the chat template of the model refuses or drops system messages in places where "
                "requests have them: the first ones are joined, and others are shown as the "
                "user's, between <system> and </system>"
            )
        return fitted


def roles_of(tokenizer: Any, variables: Mapping[str, Any]) -> TemplateRoles:
    """The roles of a tokenizer of mlx-lm, whose template has these variables in all prompts."""
    names_developer = "developer" in template_text(tokenizer)
    if not tokenizer.has_chat_template:
        return TemplateRoles(None, names_developer)
    forms: tuple[Form | None, ...] = (None, merged, marked)
    taken = [form for form in forms if _takes(tokenizer, variables, form)]
    return TemplateRoles(taken[0] if taken else None, names_developer)


def template_text(tokenizer: Any) -> str:
    """What makes the prompts of a tokenizer of mlx-lm: the text of a template, or of a program."""
    inner = tokenizer._tokenizer
    usual = PreTrainedTokenizerBase.apply_chat_template
    render = tokenizer._chat_template or getattr(type(inner), "apply_chat_template", usual)
    if render is usual:
        template = inner.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())
    try:
        return inspect.getsource(inspect.getmodule(render) or render)
    except (OSError, TypeError):
        return ""


def _takes(tokenizer: Any, variables: Mapping[str, Any], form: Form | None) -> bool:
    """Whether prompts of the probe show all of it in a form."""
    messages = [{**each} for each in (form(_PROBE) if form else _PROBE)]
    try:
        shown = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables
        )
    except Exception:
        return False
    return all(each["content"] in shown for each in _PROBE)


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
_PARAMETERS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
_OF_TOKENS = _PARAMETERS.keys() - _OF_TEMPLATES
# Beside a border they would show that a tokenizer looks across it.
_NEIGHBOURS = ("", " ", "  ", "\n", "a", "a ", " a", "1", ".", "é", "\u0338", "▁", "界")


class KeptTokens:
    """The parts that were used last, with their tokens. Any thread may use it. `borders` finds the
    added tokens that begin a part."""

    def __init__(self, borders: re.Pattern[str], most_bytes: int = MOST_BYTES) -> None:
        self._borders = borders
        self._kept: LRU[tuple[Hashable, str], array[int]] = LRU(
            most_bytes,
            lambda key, tokens: (
                sys.getsizeof(key[1]) + len(tokens) * tokens.itemsize + _ENTRY_BYTES
            ),
        )
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
        """The tokens of a part; `encode` makes them if they are not kept. Who has another salt
        cannot learn from the time that this takes whether somebody sent the same text."""
        key = salt, part
        with self._lock:
            tokens = self._kept.use(key)
        if tokens is None:
            tokens = array("I", encode(part))
            with self._lock:
                self._kept[key] = tokens
        return tokens


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


def callless_machine(tokenizer: Any) -> TextStateMachine:
    """Separates reasoning from text of a tokenizer of mlx-lm, and leaves calls where they are."""
    transitions = {
        state: [(mark, target) for mark, target in edges if target != "tool"]
        for state, edges in tokenizer.response_transitions.items()
    }
    callless = SimpleNamespace(
        has_thinking=tokenizer.has_thinking,
        think_start=tokenizer.think_start,
        think_end=tokenizer.think_end,
        has_tool_calling=False,
        structural_markers=tokenizer.structural_markers,
        response_transitions=transitions,
    )
    machine: TextStateMachine = make_text_state_machine(callless)
    return machine
