"""An answer as items of one kind each: thoughts, texts and calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_kv.server.completions.interface import Call, Choice


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


Part = Reasoning | Text | Call


@dataclass(frozen=True)
class ItemStart:
    """An item begins; its first part follows."""

    first: Part


@dataclass(frozen=True)
class ItemEnd:
    """The item that began last has ended; `finish_reason` says why if the answer ends with it."""

    kind: type[Part]
    finish_reason: str | None = None


class AnswerItems:
    """The items of one choice, in order: each begins, has parts and ends.

    Models write line ends between thoughts, texts and calls, and templates write them again when
    the answer comes back in the next prompt: they are left out, so that the prompt is what the
    model wrote, whose pages are cached.
    """

    def __init__(self) -> None:
        self._open: type[Part] | None = None
        self._last: type[Part] | None = None
        # Line ends that wait for more of the same kind.
        self._held = ""
        self._held_kind: type[Reasoning] | type[Text] = Text

    def take(self, new: Choice) -> Iterator[ItemStart | Part | ItemEnd]:
        """What a choice's new part adds."""
        for part in self._parts(new):
            if self._open is not type(part) or (isinstance(part, Call) and part.call_id):
                yield from self._close()
                self._open = type(part)
                yield ItemStart(part)
            yield part
        if new.finish_reason is not None:
            yield from self._close(new.finish_reason)

    def _close(self, finish_reason: str | None = None) -> Iterator[ItemEnd]:
        if self._open is not None:
            yield ItemEnd(self._open, finish_reason)
            self._open = None

    def _parts(self, new: Choice) -> Iterator[Part]:
        # What a call ends with comes before a text that is new.
        ends = [call for call in new.calls if not call.call_id]
        yield from ends
        yield from self._piece(Reasoning, new.reasoning)
        yield from self._piece(Text, new.text)
        for call in new.calls[len(ends) :]:
            self._last, self._held = Call, ""
            yield call
        if new.finish_reason is not None and self._held and self._last is self._held_kind:
            yield self._held_kind(self._held)

    def _piece(self, kind: type[Reasoning] | type[Text], text: str) -> Iterator[Part]:
        if not text:
            return
        whole = self._held + text if self._held_kind is kind else text
        if self._last not in (kind, None):
            whole = whole.lstrip("\n")
        written = whole.rstrip("\n")
        self._held, self._held_kind = whole[len(written) :], kind
        if written:
            self._last = kind
            yield kind(written)


def of_items(answer: Choice) -> Choice:
    """A whole choice with what its items have, without the line ends between them."""
    whole = Choice(answer.index, finish_reason=answer.finish_reason)
    for part in AnswerItems().take(answer):
        match part:
            case Reasoning(text):
                whole.reasoning += text
            case Text(text):
                whole.text += text
            case Call():
                whole.calls.append(part)
    return whole
