"""Splits what a choice adds into parts of one kind each, for interfaces whose answers are lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_kv.integrations.server.completions.choices import Choice


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """A whole tool call.

    Attributes:
        call_id: identifies it.
        name: of the function.
        arguments: JSON.
    """

    call_id: str
    name: str
    arguments: str


Part = Reasoning | Text | Call


class AnswerParts:
    """The parts of one choice, in order. A piece continues the part before it if both are of the
    same kind.

    Models write line ends between thoughts, texts and calls, and templates write them again when
    the answer comes back in the next prompt: they are left out, so that the prompt is what the
    model wrote, whose pages are cached.
    """

    def __init__(self) -> None:
        self._open: type[Part] | None = None
        # Line ends that wait for more of the same kind.
        self._held = ""
        self._held_kind: type[Reasoning] | type[Text] = Text

    def take(self, new: Choice) -> Iterator[Part]:
        """The parts that a choice's new part adds."""
        yield from self._piece(Reasoning, new.reasoning)
        yield from self._piece(Text, new.text)
        for call in new.tool_calls:
            self._open, self._held = Call, ""
            function = call["function"]
            yield Call(call["id"], function["name"], function["arguments"])
        if new.finish_reason is not None and self._held and self._open is self._held_kind:
            yield self._held_kind(self._held)

    def _piece(self, kind: type[Reasoning] | type[Text], text: str) -> Iterator[Part]:
        if not text:
            return
        whole = self._held + text if self._held_kind is kind else text
        if self._open not in (kind, None):
            whole = whole.lstrip("\n")
        said = whole.rstrip("\n")
        self._held, self._held_kind = whole[len(said) :], kind
        if said:
            self._open = kind
            yield kind(said)
