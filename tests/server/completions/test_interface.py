"""The items of answers: thoughts, texts and calls, without the line ends between them."""

from dataclasses import replace

import pytest

from paged_kv.server.completions.interface import (
    AnswerItems,
    Call,
    Choice,
    ItemEnd,
    ItemStart,
    Part,
    Reasoning,
    Text,
)

CALL = Call("1", "f", "{}")
END = Choice(0, finish_reason="stop")
CALLED = Choice(0, calls=[CALL])


def text(said: str) -> Choice:
    return Choice(0, text=said)


def thought(said: str) -> Choice:
    return Choice(0, reasoning=said)


def pieces(arguments: str, call_id: str = "") -> list[Call]:
    """A piece of a call; the first one has an id."""
    return [Call(call_id, "f" if call_id else "", arguments)]


def called(arguments: str, call_id: str = "") -> Choice:
    return Choice(0, calls=pieces(arguments, call_id))


def items(*news: Choice) -> list[Part]:
    """The items, each whole."""
    taken, whole = AnswerItems(), list[Part]()
    for change in (change for new in news for change in taken.take(new)):
        match change:
            case ItemStart(Call(call_id, name)):
                whole.append(Call(call_id, name, ""))
            case ItemStart(Reasoning() | Text() as first):
                whole.append(type(first)(""))
            case ItemEnd(kind):
                assert kind is type(whole[-1])
            case Reasoning() | Text():
                assert type(change) is type(whole[-1])
                whole[-1] = type(change)(whole[-1].text + change.text)
            case Call():
                last = whole[-1]
                assert isinstance(last, Call)
                whole[-1] = replace(last, arguments=last.arguments + change.arguments)
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
        (
            [called("{", "1"), called("}"), Choice(0, "\na", calls=pieces("{}", "2")), END],
            [Call("1", "f", "{}"), Text("a"), Call("2", "f", "{}")],
        ),
        (
            [called("{", "1"), Choice(0, "a", calls=pieces("}") + pieces("{}", "2")), END],
            [Call("1", "f", "{}"), Text("a"), Call("2", "f", "{}")],
        ),
        (
            # Some tokenizers give the text of many tokens at once.
            [Choice(0, calls=pieces("{", "1") + pieces("}")), END],
            [Call("1", "f", "{}")],
        ),
        ([thought("\n"), thought("\n"), text("\n\na"), END], [Text("\n\na")]),
        ([text("\n"), END], []),
        ([END], []),
    ],
)
def test_line_ends_between_parts_belong_to_none(news: list[Choice], expected: list[Part]) -> None:
    assert items(*news) == expected


def test_only_the_item_that_a_limit_ends_is_incomplete() -> None:
    ended = [
        change
        for change in AnswerItems().take(Choice(0, "a", "b", finish_reason="length"))
        if isinstance(change, ItemEnd)
    ]
    assert ended == [ItemEnd(Reasoning), ItemEnd(Text, "length")]
