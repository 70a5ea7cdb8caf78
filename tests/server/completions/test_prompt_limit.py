"""Prompts longer than the model's context are refused, long texts before all of them is read."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlx_lm.utils import load_tokenizer

from paged_kv.server.completions.prompt_reader import LimitedTokenizer
from paged_kv.server.engine.chat_templates import KeptTokens, kept_tokens_of
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.options import ServerOptions
from tests.support.agent_model import agent_folder


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


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


def limited(tokenizer: Any = None, kept: Any = None, **options: Any) -> LimitedTokenizer:
    loaded: Any = Namespace(context_length=1000, tokenizer=tokenizer, kept_tokens=kept)
    return LimitedTokenizer(loaded, ServerOptions(), "prompt", **options)


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
        tokenizer.apply_chat_template(chat(text), tokenize=True)
    assert inner.made == 200_000


def test_of_a_long_chat_in_parts_no_more_is_read_than_its_length_takes() -> None:
    inner, kept = Tokenizer(), KeptTokens(re.compile("<m>"))
    messages = chat(*["<m>" + "a" * 1500] * 3)
    with pytest.raises(APIError, match="1504 tokens > 1000 maximum"):
        limited(inner, kept).apply_chat_template(messages, tokenize=True)
    assert inner.made == 1503
    counting = limited(inner, kept, is_counted=True)
    assert len(counting.apply_chat_template(messages, tokenize=True)) == 3 * 1504
    assert inner.made == 1503
    long = chat("<m>" + "a" * 250_000)
    assert len(counting.apply_chat_template(long, tokenize=True)) == 250_003 + 3


def test_each_turn_has_the_tokens_of_its_whole_text_and_reads_only_what_is_new(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(Path(agent_folder(tmp_path)))
    kept = kept_tokens_of(tokenizer)
    assert kept is not None
    read = 0
    for turn in range(1, 4):
        messages = chat(*[f"{number} import os<think>\n" * 100 for number in range(turn)])
        named: Any = {"tools": [{"name": "f"}], "add_generation_prompt": True}
        limiting = limited(tokenizer, kept, is_counted=True)
        with patch.object(tokenizer._tokenizer, "encode", wraps=tokenizer.encode) as encode:
            tokens = limiting.apply_chat_template(messages, tokenize=True, **named)
        read += sum(len(call.args[0]) for call in encode.call_args_list)
        assert tokens == tokenizer.apply_chat_template(messages, **named)
    assert read < 1.5 * len(tokenizer.decode(tokens))
    named |= {"truncation": True, "max_length": 5}
    assert len(limiting.apply_chat_template(messages, tokenize=True, **named)) == 5
