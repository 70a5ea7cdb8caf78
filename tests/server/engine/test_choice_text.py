"""The text of tokens: stop words, reasoning and tool calls."""

from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import make_text_state_machine
from mlx_lm.tool_parsers import json_tools

from paged_kv.server.engine.chat_templates import callless_machine
from paged_kv.server.engine.choice_text import ChoiceText, Delta, stop_machine
from paged_kv.server.engine.jobs import Token

WORDS = ["a", "b", "c", "<think>", "</think>", "<tool>", "</tool>"]
WORDS += ['{"name": "f"', ', "arguments": {}}', "d"]
# A token without a word: it has none to add.
END = len(WORDS)


class Detokenizer:
    """A tokenizer in which token i is word i."""

    _new = ""

    @property
    def last_segment(self) -> str:
        text, self._new = self._new, ""
        return text

    def add_token(self, token: int) -> None:
        self._new += WORDS[token]

    def finalize(self) -> None:
        pass


def loaded() -> Any:
    tokenizer = SimpleNamespace(
        has_thinking=True,
        think_start="<think>",
        think_end="</think>",
        has_tool_calling=True,
        tool_call_start="<tool>",
        tool_call_end="</tool>",
        tool_parser=json_tools.parse_tool_call,
        structural_markers=[],
        response_transitions={},
        detokenizer=Detokenizer(),
        eos_token_ids=[END],
    )
    machine = make_text_state_machine(tokenizer)
    callless = callless_machine(tokenizer)
    return SimpleNamespace(tokenizer=tokenizer, text_machine=machine, callless_machine=callless)


def read(words: list[str], end: str, *stop: str, has_tools: bool = True) -> list[Delta]:
    """The text that each word adds; the last word ends the text."""
    text = ChoiceText(loaded(), "normal", stop_machine(stop), has_tools=has_tools)
    reasons: list[str | None] = [None] * len(words)
    reasons[-1] = end
    deltas = []
    for word, reason in zip(words, reasons, strict=True):
        deltas.append(text.take(Token(0, WORDS.index(word), finish_reason=reason)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def joined(deltas: list[Delta]) -> tuple[str, str, int, str | None]:
    return (
        "".join(each.text for each in deltas),
        "".join(each.reasoning for each in deltas),
        sum(len(each.calls) for each in deltas),
        deltas[-1].finish_reason,
    )


def test_tool_calls_are_told_apart_whole() -> None:
    words = ["a", "<tool>", '{"name": "f"', ', "arguments": {}}', "</tool>", "d"]
    deltas = read(words, "length")
    assert joined(deltas) == ("ad", "", 1, "length")
    assert [call for each in deltas for call in each.calls] == ['{"name": "f", "arguments": {}}']
    # The end token is not part of the text, nor of a call that is open at that point.
    cut = read([*words[:4], "a"], "stop")
    assert joined(cut) == ("a", "", 0, "stop")
    assert cut[-1].open_call == words[2] + words[3]
    written = joined(read(["<think>", *words[1:], "</think>", *words], "length", has_tools=False))
    assert written == ("".join(words), "".join(words[1:]), 0, "length")


def test_text_ends_before_a_stop_word() -> None:
    for stop, text in (("bc", "a"), ("c", "ab"), ("abcd", ""), ("cda", "abcd"), ("x", "abcd")):
        end = "length" if text == "abcd" else "stop"
        deltas = read(["a", "b", "c", "d"], "length", "xy", stop)
        assert joined(deltas) == (text, "", 0, end)
        assert deltas[-1].stop_text == (stop if end == "stop" else None)
    # It may begin and end within a token.
    deltas = read(["a", '{"name": "f"'], "length", "name")
    assert (joined(deltas), deltas[-1].stop_text) == (('a{"', "", 0, "stop"), "name")


def test_bytes_that_are_no_character_are_not_decoded_again_with_every_token() -> None:
    """A client can make a model write them with a logit bias."""
    model = loaded()
    waiting, most = 0, 0

    class Unfinished(Detokenizer):
        """Holds everything until it is told to finish."""

        _held = ""

        def add_token(self, token: int) -> None:
            nonlocal waiting, most
            self._held += WORDS[token]
            waiting += 1
            most = max(most, waiting)

        def finalize(self) -> None:
            nonlocal waiting
            self._new, self._held, waiting = self._held, "", 0

    model.tokenizer.detokenizer = Unfinished()
    text = ChoiceText(model, "normal", stop_machine([]))
    deltas = [text.take(Token(0, 0)) for _ in range(999)]
    deltas.append(text.take(Token(0, 0, finish_reason="length")))
    assert joined(deltas) == ("a" * 1000, "", 0, "length")
    assert most <= 66


def test_an_end_token_that_ends_nothing_has_no_text() -> None:
    text = ChoiceText(loaded(), "normal", stop_machine([]))
    tokens = [Token(0, 9), Token(0, END), Token(0, 9, finish_reason="length")]
    assert [text.take(token).text for token in tokens] == ["d", "", "d"]


def test_stop_words_count_behind_the_first_tokens_only() -> None:
    text = ChoiceText(loaded(), "normal", stop_machine(["d"]), min_tokens=2)
    taken = [text.take(Token(0, 9)) for _ in range(3)]
    assert [(each.text, each.finish_reason) for each in taken] == [
        *[("d", None)] * 2,
        ("", "stop"),
    ]
