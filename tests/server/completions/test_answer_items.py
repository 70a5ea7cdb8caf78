"""The items of answers: thoughts, texts and calls, without the line ends between them."""

import pytest

from paged_kv.server.completions.answer_items import (
    AnswerItems,
    Begun,
    Call,
    Ended,
    Part,
    Reasoning,
    Text,
)
from paged_kv.server.completions.choices import Choice, Usage
from paged_kv.server.messages.answers import MessageAnswers

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


END = Choice(0, finish_reason="stop")
CALLED = Choice(0, tool_calls=[CALL])


def text(said: str) -> Choice:
    return Choice(0, text=said)


def thought(said: str) -> Choice:
    return Choice(0, reasoning=said)


def items(*news: Choice) -> list[Part]:
    """The items, each whole."""
    taken, whole = AnswerItems(), list[Part]()
    for change in (change for new in news for change in taken.take(new)):
        match change:
            case Begun(first):
                whole.append(first if isinstance(first, Call) else type(first)(""))
            case Ended(kind):
                assert kind is type(whole[-1])
            case Reasoning() | Text():
                assert type(change) is type(whole[-1])
                whole[-1] = type(change)(whole[-1].text + change.text)
    return whole


@pytest.mark.parametrize(
    ("news", "expected"),
    [
        ([text("\n"), text("a\n"), text("\nb\n"), END], [Text("\na\n\nb\n")]),
        (
            [thought("\na"), thought("\n"), text("\n"), text("\n b"), END],
            [Reasoning("\na"), Text(" b")],
        ),
        (
            [text("a\n"), CALLED, text("\n"), CALLED, text("\n"), END],
            [Text("a"), Call("1", "f", "{}"), Call("1", "f", "{}")],
        ),
        ([thought("\n"), thought("\n"), text("\n\na"), END], [Text("\n\na")]),
        ([text("\n"), END], []),
        ([END], []),
    ],
)
def test_line_ends_between_parts_belong_to_none(news: list[Choice], expected: list[Part]) -> None:
    assert items(*news) == expected


@pytest.mark.parametrize("calls", [[], [CALL]])
def test_a_call_that_could_not_be_parsed_is_none(calls: list[dict[str, object]]) -> None:
    answers = MessageAnswers("a", "m", shows_thinking=True)
    whole = answers.whole([Choice(0, tool_calls=calls, finish_reason="tool_calls")], Usage())
    assert whole["stop_reason"] == ("tool_use" if calls else "end_turn")


def test_only_the_item_that_a_limit_ends_is_incomplete() -> None:
    ended = [
        change
        for change in AnswerItems().take(Choice(0, "a", "b", finish_reason="length"))
        if isinstance(change, Ended)
    ]
    assert ended == [Ended(Reasoning), Ended(Text, "length")]
