"""What an interface makes of a request, what the request gets, and what writes that as an answer.

All interfaces share the rest: a request asks for a chat (or a completion), and gets choices. Those
whose answers are items of one kind each, thoughts, texts and calls, get these from `AnswerItems`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from paged_kv.server.engine.jobs import HeldPrompt, ScoredToken, Token
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.schema import Body

Object = dict[str, Any]


@dataclass
class Usage:
    """The token counts of a request. `accepted_tokens` of the `draft_tokens` were accepted, and
    `held` says how many first tokens of a prompt stay cached, and how long. `max_tokens` is the
    most tokens of a choice where the request asked for more than fit."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_tokens: int = 0
    draft_tokens: int = 0
    reasoning_tokens: int = 0
    held: tuple[HeldPrompt, ...] = ()
    max_tokens: int | None = None

    @property
    def limit(self) -> dict[str, int]:
        """The field of usage objects that says how many tokens fit, where more were asked for."""
        return {} if self.max_tokens is None else {"max_tokens": self.max_tokens}

    def as_dict(self) -> Object:
        """OpenAI's `usage` object, which counts drafted tokens as those of predicted outputs."""
        details = {"reasoning_tokens": self.reasoning_tokens} if self.reasoning_tokens else {}
        if self.draft_tokens:
            details |= {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
            }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"completion_tokens_details": details} if details else {}),
            **self.limit,
        }


@dataclass(frozen=True)
class Call:
    """A tool call, or a piece of it: a further piece of the last call has no `call_id` and no
    `name`. The `arguments` of all pieces together are JSON, and `index` is the number of the call
    in its choice."""

    call_id: str
    name: str
    arguments: str
    index: int = 0


@dataclass
class Choice:
    """One choice, as far as it is generated.

    Attributes:
        index: its number.
        tokens: those not sent yet, with log probabilities, if the request asked for these.
        count: the number of all its tokens.
        reasoning_count: of these, the number of those of thoughts.
        stop_text: the stop text before which it ended, if it did.
        prompt: the log probabilities of its prompt, if they were asked for.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)
    count: int = 0
    reasoning_count: int = 0
    stop_text: str | None = None
    prompt: list[ScoredToken] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing yet, tokens aside."""
        return not (self.text or self.reasoning or self.calls or self.finish_reason)

    def add(self, new: Choice) -> None:
        """Append a part that was generated since."""
        self.text += new.text
        self.reasoning += new.reasoning
        self.calls += new.calls
        self.tokens += new.tokens
        self.finish_reason = new.finish_reason
        self.stop_text = new.stop_text
        self.prompt = new.prompt or self.prompt


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
        ends = [*takewhile(lambda call: not call.call_id, new.calls)]
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


class Answers:
    """Writes the answers to one request. Each object of a stream is an event; one with a "type" is
    sent under this name, and `last` ends a stream without an error."""

    last = b""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Object:
        """The answer to a request without `stream`."""
        raise NotImplementedError

    def on_start(self, usage: Usage) -> list[Object]:
        """The events that begin a stream."""
        return []

    def on_delta(self, new: Choice) -> list[Object]:
        """The events for one choice's new part."""
        raise NotImplementedError

    def on_end(self, usage: Usage) -> list[Object]:
        """The events after the last new part."""
        return []

    def on_error(self, error: APIError) -> list[Object]:
        """The events that end a stream with an error."""
        return [error.as_dict()]

    def sent_back(self, answer: Choice) -> Choice:
        """A whole answer as the client sends it back with its next message."""
        return answer

    def heartbeat(self) -> list[Object]:
        """The events of a stream in which nothing happens; the server adds a comment."""
        return []


class Mark(NamedTuple):
    """The end of a prefix of a prompt, of so many chat messages, that is to stay cached for so many
    seconds after its last use."""

    messages: int
    seconds: float


@dataclass(frozen=True)
class APIRequest:
    """A request of any interface.

    Attributes:
        body: what it asks for.
        nbytes: the length of the body as it came, and of what it continues.
        answers: makes the writer of the answers, of the request's id and the model's tokenizer;
            None where nothing is generated.
        names: the interface's names for fields of `body`, where they differ.
        marks: what is to stay cached of its prompt.
        is_counted: whether only the tokens of its prompt are counted, however many.
    """

    body: Body
    nbytes: int
    answers: Callable[[str, Any], Answers] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    is_counted: bool = False


# Reads the bytes of a body for the client with this salt of its API key, on a reader thread. Raises
# APIError 400 if something is wrong with it.
Reader = Callable[[bytes, str | None], APIRequest]


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Put errors in the words of an interface that has these names for fields."""
    try:
        yield
    except APIError as error:
        first, dot, rest = (error.param or "").partition(".")
        if first not in names:
            raise
        # Most messages begin with the field that they are about.
        message, param = error.message, f"{names[first]}{dot}{rest}"
        if message.startswith(first):
            message = names[first] + message.removeprefix(first)
        raise APIError(
            error.status, message, param=param, code=error.code, headers=error.headers
        ) from error
