"""Fits the roles of messages to a model's chat template: some refuse instructions behind the first
message, or drop them without a word."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from paged_kv.kernels.pages.errors import warn_once

Messages = list[dict[str, Any]]
Form = Callable[[Sequence[Any]], Messages]


def merged(messages: Sequence[Any]) -> Messages:
    """The same conversation with one system message, its first. Later ones are the user's, in their
    places: at the beginning they would change the prefix with every turn."""
    leading = list(takewhile(_instructs, messages))
    first = leading[:1]
    for each in leading[1:]:
        first = [_joined(first[0], each)]
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
    """Which roles a chat template takes, and where.

    Attributes:
        form: changes a conversation that the template refuses; None if it takes all.
        names_developer: whether it tells the messages of developers from those of the system.
    """

    form: Form | None
    names_developer: bool

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
    """The roles of a tokenizer of mlx-lm.

    Args:
        variables: of its template, that all prompts have.
    """
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
