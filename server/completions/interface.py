"""An interface is how one API's requests are read, and how its answers are written.

All interfaces share the rest: a request becomes a body of chat completions (or completions), and
the choices that this gets become the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from paged_kv.server.completions.choices import Choice, Usage
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.http.request_body import body_of
from paged_kv.server.http.schema import Body, ChatBody


class Answers:
    """Writes the answers to one request.

    Each object of a stream is an event; one with a "type" is sent under this name.

    Attributes:
        last: bytes that end a stream without an error.
    """

    last = b""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        raise NotImplementedError

    def begun(self, usage: Usage) -> list[dict[str, Any]]:
        """The events that begin a stream."""
        return []

    def news(self, new: Choice) -> list[dict[str, Any]]:
        """The events for one choice's new part."""
        raise NotImplementedError

    def ended(self, usage: Usage) -> list[dict[str, Any]]:
        """The events after the last new part."""
        return []

    def failed(self, error: APIError) -> list[dict[str, Any]]:
        """The events that end a stream with an error."""
        return [error.as_dict()]

    def idle(self) -> list[dict[str, Any]]:
        """The events of a stream in which nothing happens; the server adds a comment."""
        return []


class Mark(NamedTuple):
    """The end of a prefix of a prompt that is to stay cached.

    Attributes:
        messages: how many of the chat's messages the prefix has.
        seconds: how long it is to stay after its last use.
    """

    messages: int
    seconds: float


@dataclass(frozen=True)
class ReadRequest:
    """What a request asks for.

    Attributes:
        body: in the form of chat completions or completions.
        answers: makes the writer of the answers, of the request's id and the model's tokenizer.
        nbytes: the length of the body as it came.
        marks: what is to stay cached of its prompt.
        is_counted: whether only the tokens of its prompt are counted, however many.
    """

    body: Body
    answers: Callable[[str, Any], Answers]
    nbytes: int
    marks: Sequence[Mark] = ()
    is_counted: bool = False


class Interface:
    """One API.

    Attributes:
        fields: its names for fields of chat completions, where they differ.
    """

    fields: ClassVar[Mapping[str, str]] = {}

    def read(self, content: bytes, key: str | None) -> ReadRequest:
        """What the bytes of a body ask for. Runs on a reader thread.

        Args:
            key: the salt of the client's API key, if there are keys.

        Raises:
            APIError: 400, something is wrong with it.
        """
        raise NotImplementedError

    def chat_body(self, fields: dict[str, Any]) -> ChatBody:
        """The body of chat completions that a request has become.

        Raises:
            APIError: 400, something is wrong with it, in the words of this interface.
        """
        try:
            return body_of(fields, ChatBody)
        except APIError as error:
            raise self.renamed(error) from error

    def renamed(self, error: APIError) -> APIError:
        """An error in the words of this interface."""
        first, dot, rest = (error.param or "").partition(".")
        if first not in self.fields:
            return error
        named = self.fields[first]
        # Most messages begin with the field that they are about.
        message = error.message
        if message.startswith(first):
            message = named + message.removeprefix(first)
        return APIError(
            error.status,
            message,
            param=f"{named}{dot}{rest}",
            code=error.code,
            headers=error.headers,
        )
