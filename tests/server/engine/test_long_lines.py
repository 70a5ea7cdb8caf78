"""Long lines are decoded in parts, and their text is the same."""

import random
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from paged_kv.server.engine.choice_text import MOST_LINE_TOKENS, linear_time

# Of one to four bytes.
CHARACTERS = "aé日😀"
WORDS = ["the", "cat", "'", "s", "n't", ".", ",", "!", "  ", "end"]


def of_bytes() -> Any:
    """Each token is a byte, as in tokenizers like GPT-2's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def of_pieces() -> Any:
    """Tokens are words and bytes, and the first space is left out, as with SentencePiece."""
    pieces = [f"▁{word}" for word in WORDS] + [f"<0x{byte:02X}>" for byte in range(256)]
    model = Tokenizer(WordLevel({piece: number for number, piece in enumerate(pieces)}, "▁the"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=model)


def of_words() -> Any:
    """Words with a space between any two, which is taken back before a full stop or so."""
    model = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "the"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=True)


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, tokens: list[int]) -> str:
        self.decoded += len(tokens)
        text: str = self._tokenizer.decode(tokens)
        return text

    def encode(self, text: str, **options: Any) -> Any:
        return self._tokenizer.encode(text, **options)


def segments(detokenizer: Any, tokens: list[int]) -> list[str]:
    found = []
    for token in tokens:
        detokenizer.add_token(token)
        found.append(detokenizer.last_segment)
    detokenizer.finalize()
    return [*found, detokenizer.last_segment]


def assert_equal_in_linear_time(tokenizer: Any, tokens: list[int]) -> None:
    """Beside mlx-lm's, also when half a character is the end."""
    for text in (tokens, tokens[:-1]):
        counting: Any = Counting(tokenizer)
        found = segments(linear_time(NaiveStreamingDetokenizer(counting)), text)
        assert found == segments(NaiveStreamingDetokenizer(tokenizer), text)
        assert counting.decoded <= MOST_LINE_TOKENS * len(text)


def random_text(seed: int) -> bytes:
    """Lines of some hundred bytes, with spaces at the end of some."""
    rng = random.Random(seed)
    return "".join(rng.choices([*CHARACTERS * 40, " ", " \n"], k=700)).encode()


def random_pieces(seed: int) -> list[int]:
    """Words, and between some of them a character in bytes."""
    rng, tokens = random.Random(seed), [0]
    for _ in range(300):
        tokens.append(rng.randrange(len(WORDS)))
        if rng.random() < 0.3:
            character = rng.choice([*CHARACTERS, "\n"] if rng.random() < 0.05 else CHARACTERS)
            tokens += [len(WORDS) + byte for byte in character.encode()]
    return [*tokens, len(WORDS) + 0xF0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_text_is_as_of_mlx_lm(seed: int) -> None:
    tokenizer = of_bytes()
    assert_equal_in_linear_time(tokenizer, tokenizer.encode(random_text(seed).decode()))
    assert_equal_in_linear_time(of_pieces(), random_pieces(seed))
    words = random.Random(seed).choices(range(len(WORDS)), k=500)
    assert_equal_in_linear_time(of_words(), words)


@pytest.mark.parametrize("shift", range(3))
def test_a_line_of_long_characters_is_shortened_wherever_they_begin(shift: int) -> None:
    """At one of the shifts, no doubling of the length would be between two characters."""
    counting: Any = Counting(of_bytes())
    text = "a" * shift + "日" * 1400
    tokens = counting.encode(text)
    assert "".join(segments(linear_time(NaiveStreamingDetokenizer(counting)), tokens)) == text
    assert counting.decoded <= MOST_LINE_TOKENS * len(tokens)
