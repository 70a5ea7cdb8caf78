"""Parses the tool calls in answers with mlx-lm's parsers, whose cost a client chooses.

Some take quadratic or cubic time. Of texts that are made for them, minicpm5's takes 0.04 s for
1,024 characters and 2 s for 4,096, and gemma4's minutes for 131,072. A thread parses short texts:
the parsers search with the package regex, which lets other threads run meanwhile. A process, which
the system ends in time, parses long ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from paged_kv.server.completions import parse_tool_call
from paged_kv.server.completions.interface import Call
from paged_kv.server.completions.open_call import OpenCall, open_call
from paged_kv.server.completions.workers import WorkerThreads, run_python
from paged_kv.server.engine.choice_text import Delta

log = logging.getLogger(__name__)

# A process takes a tenth of a second to start, in which a model writes a few of so many characters.
LONG_CALL_CHARACTERS = 1024
TIME_LIMIT_S = 10
MOST_PROCESSES = 2
# An error may quote the whole call.
MOST_LOGGED = 200

# Takes the text of a call and the request's tools; makes a call, or a list of calls.
Parser = Callable[[str, Any], Any]


class CallParser:
    """Parses the calls of all requests of a server.

    Args:
        workers: their threads.
    """

    def __init__(self, workers: WorkerThreads) -> None:
        self._workers = workers
        self._processes = asyncio.Semaphore(MOST_PROCESSES)

    async def parse(self, parser: Parser, tools: Any, text: str) -> Any:
        """What a parser makes of a text.

        Args:
            parser: a function of a module of a package, which a process finds by its name.
            tools: of the request.
            text: of one call, or of several.

        Raises:
            Exception: the parser does not understand the text, or not in time.
        """
        if len(text) <= LONG_CALL_CHARACTERS:
            return await self._workers.write(partial(parser, text, tools), 0)
        async with self._processes:
            question = await self._workers.write(partial(_question, text, tools), sys.maxsize)
            return json.loads(await _answer(parser, question))


class CallsAndText(NamedTuple):
    """The tool calls in a part of a choice, and the text beside them."""

    calls: list[Call]
    text: str


class ChoiceCalls:
    """The tool calls of one choice.

    Args:
        calls: parses them.
        tokenizer: mlx-lm's, of the model.
        tools: of the request.
        is_streamed: whether to send a call before its end.

    Attributes:
        num_calls: the number of calls so far.
    """

    def __init__(self, calls: CallParser, tokenizer: Any, tools: Any, is_streamed: bool) -> None:
        self.num_calls = 0
        parser = tokenizer.tool_parser
        self._parse = partial(calls.parse, parser, tools)
        self._marks = tokenizer.tool_call_start, tokenizer.tool_call_end
        # Of a whole answer nobody reads a part. The template may show tools to a model whose calls
        # mlx-lm cannot read.
        form = parser.__module__.rpartition(".")[2] if is_streamed and parser else ""
        self._new_call = partial(open_call, form, tools)
        self._open = self._new_call()

    async def take(self, delta: Delta) -> CallsAndText:
        """The calls in a part of the choice. Calls that the parser does not understand, or that are
        cut, are text, unless a stream has sent a piece of them: in streams arguments come in
        pieces, in the forms that `open_call` reads."""
        parts = [await self._ended(text, is_cut=False) for text in delta.calls]
        parts.append(CallsAndText([], delta.text))
        if delta.open_call is not None and delta.finish_reason is None:
            parts.append(CallsAndText(list(self._pieces(self._open, delta.open_call)), ""))
        elif delta.open_call is not None:
            parts.append(await self._ended(delta.open_call, is_cut=True))
        calls = [call for each in parts for call in each.calls]
        return CallsAndText(calls, "".join(each.text for each in parts))

    async def _ended(self, text: str, *, is_cut: bool) -> CallsAndText:
        opened, self._open = self._open, self._new_call()
        pieces = list(self._pieces(opened, text)) if opened.has_begun else []
        if opened.is_whole:
            return CallsAndText(pieces, "")
        try:
            parsed = await self._parse(text)
            if opened.has_begun:
                return CallsAndText([*pieces, self._piece(opened.rest(parsed["arguments"]))], "")
            whole = parsed if isinstance(parsed, list) else [parsed]
            calls = [
                _call(each, json.dumps(each["arguments"], ensure_ascii=False), number)
                for number, each in enumerate(whole, self.num_calls)
            ]
            self.num_calls += len(calls)
            if calls:
                return CallsAndText(calls, "")
            why = "there is none"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        log.warning("a tool call could not be parsed: %s", why[:MOST_LOGGED])
        if opened.has_begun:
            return CallsAndText(pieces, "")
        start, end = self._marks
        return CallsAndText([], f"{start}{text}{'' if is_cut else end}")

    def _pieces(self, opened: OpenCall, text: str) -> Iterator[Call]:
        for head, arguments in opened.take(text):
            if head is None:
                yield self._piece(arguments)
            else:
                self.num_calls += 1
                yield _call(head, arguments, self.num_calls - 1)

    def _piece(self, arguments: str) -> Call:
        return Call("", "", arguments, self.num_calls - 1)


def _call(head: Mapping[str, Any], arguments: str, index: int) -> Call:
    return Call(head.get("id") or str(uuid4()), head["name"], arguments, index)


def _question(text: str, tools: Any) -> bytes:
    # As `json.dumps` would hold Python's lock, and tools can be megabytes.
    return "".join(json.JSONEncoder().iterencode([text, tools])).encode()


async def _answer(parser: Parser, question: bytes) -> bytes:
    arguments = parser.__module__, parser.__qualname__, str(TIME_LIMIT_S)
    ended = await run_python(parse_tool_call.__file__, *arguments, question=question)
    if ended.is_too_slow:
        raise TimeoutError(f"it took longer than {TIME_LIMIT_S} s")
    if ended.status:
        raise ValueError(ended.reason)
    return ended.output
