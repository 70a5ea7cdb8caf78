"""Prompts longer than the model's context are refused, long texts before all of them is read."""

from argparse import Namespace
from typing import Any

import pytest

from paged_kv.server.completions.prompt_reader import LimitedTokenizer
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.options import ServerOptions


class Tokenizer:
    """Makes a token of each character, and counts them."""

    has_chat_template = True

    def __init__(self) -> None:
        self.made = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        self.made += len(text)
        return [0, *range(len(text))]

    def apply_chat_template(self, messages: Any, *, tokenize: bool) -> Any:
        text = "".join(message["content"] for message in messages)
        return self.encode(text) if tokenize else text


def limited(tokenizer: Any = None) -> LimitedTokenizer:
    loaded: Any = Namespace(context_length=1000, tokenizer=tokenizer)
    return LimitedTokenizer(loaded, ServerOptions(), "prompt")


def test_the_context_length_is_the_longest_prompt() -> None:
    limited().require(1000)
    with pytest.raises(APIError, match="prompt is too long: 1001 tokens > 1000 maximum ") as told:
        limited().require(1001)
    refused = told.value
    assert (refused.status, refused.param) == (400, "prompt")
    assert refused.code == "context_length_exceeded"
    assert "--max-prompt-tokens" in refused.message


def test_of_a_long_text_no_more_is_read_than_its_length_takes() -> None:
    inner, text = Tokenizer(), "a" * 3_000_000
    tokenizer = limited(inner)
    with pytest.raises(APIError, match="99937 tokens > 1000 maximum"):
        tokenizer.encode(text)
    assert inner.made == 100_000
    with pytest.raises(APIError, match="99937 tokens > 1000 maximum"):
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True)
    assert inner.made == 200_000
