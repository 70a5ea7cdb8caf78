"""The parts of answers: thoughts, texts and calls, without the line ends between them."""

import pytest

from paged_kv.server.completions.answer_bodies import (
    AnswerParts,
    Call,
    Part,
    Reasoning,
    Text,
)
from paged_kv.server.completions.choices import Choice, Usage
from paged_kv.server.messages.answers import MessageAnswers

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def text(said: str) -> Choice:
    return Choice(0, text=said)


def thought(said: str) -> Choice:
    return Choice(0, reasoning=said)


def call() -> Choice:
    return Choice(0, tool_calls=[CALL])


def end() -> Choice:
    return Choice(0, finish_reason="stop")


def parts(*news: Choice) -> list[Part]:
    """The parts, those of one kind in a row as one."""
    taken, joined = AnswerParts(), list[Part]()
    for part in (part for new in news for part in taken.take(new)):
        if joined and not isinstance(part, Call) and type(joined[-1]) is type(part):
            before = joined.pop()
            assert not isinstance(before, Call)
            part = type(part)(before.text + part.text)
        joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("news", "expected"),
    [
        ([text("\n"), text("a\n"), text("\nb\n"), end()], [Text("\na\n\nb\n")]),
        (
            [thought("\na"), thought("\n"), text("\n"), text("\n b"), end()],
            [Reasoning("\na"), Text(" b")],
        ),
        (
            [text("a\n"), call(), text("\n"), call(), text("\n"), end()],
            [Text("a"), Call("1", "f", "{}"), Call("1", "f", "{}")],
        ),
        ([thought("\n"), thought("\n"), text("\n\na"), end()], [Text("\n\na")]),
        ([text("\n"), end()], []),
        ([end()], []),
    ],
)
def test_line_ends_between_parts_belong_to_none(news: list[Choice], expected: list[Part]) -> None:
    assert parts(*news) == expected


@pytest.mark.parametrize("calls", [[], [CALL]])
def test_a_call_that_could_not_be_parsed_is_none(calls: list[dict[str, object]]) -> None:
    answers = MessageAnswers("a", "m", shows_thinking=True)
    whole = answers.whole([Choice(0, tool_calls=calls, finish_reason="tool_calls")], Usage())
    assert whole["stop_reason"] == ("tool_use" if calls else "end_turn")
