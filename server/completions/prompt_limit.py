"""Refuses prompts of more tokens than a model was made for, and limits answers to its context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlx_lm.server import GenerationArguments

from paged_kv.server.engine.jobs import Prompt
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.api_errors import APIError
from paged_kv.server.options import ServerOptions

# A tokenizer takes 260 bytes of memory for each token, or 2 GB for a body of 8 MB: longer texts are
# first counted in pieces, up to the limit.
PIECE_CHARACTERS = 100_000

# More than a cut adds: the first token of a prompt, and a word or a special token in parts.
CUT_TOKENS = 64


class LimitedTokenizer:
    """A tokenizer of mlx-lm that refuses the texts of prompts that are too long, before it makes
    tokens of them.

    Args:
        loaded: the model.
        options: of the server; `max_prompt_tokens` replaces the model's context length.
        param: the field that holds the prompt.
        is_counted: whether the prompt is only counted, so that it may have any length.

    Attributes:
        param: as given.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: ServerOptions,
        param: str,
        *,
        is_counted: bool = False,
    ) -> None:
        self.param = param
        self._tokenizer = loaded.tokenizer
        self._is_counted = is_counted
        self._option: int | None = options.max_prompt_tokens
        self._most = None if is_counted else self._option or loaded.context_length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **named: Any) -> list[int]:
        """The tokens of a text.

        Raises:
            APIError: 400, it has too many.
        """
        self._require_text(text)
        tokens: list[int] = self._tokenizer.encode(text, **named)
        return tokens

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **named: Any) -> Any:
        """The tokens of a conversation.

        Raises:
            APIError: 400, it has too many.
        """
        render = self._tokenizer.apply_chat_template
        length = sum(len(message.get("content") or "") for message in messages)
        if tokenize and length > PIECE_CHARACTERS:
            text = render(messages, tokenize=False, **named)
            self._require_text(text)
            if self._is_counted:
                # As many as the text has, give or take one for each piece.
                return [token for piece in self._pieces(text) for token in piece]
        return render(messages, tokenize=tokenize, **named)

    def require(self, tokens: int, about: str = "") -> None:
        """Raise APIError 400 if so many tokens are too many; `about` tells how they were
        counted."""
        if self._most is None or tokens <= self._most:
            return
        whose = "of this server" if self._option else "context length of this model"
        raise _too_long(
            tokens,
            self._most,
            f"{whose}{about}: shorten it, or start the server with a larger --max-prompt-tokens",
            self.param,
        )

    def _require_text(self, text: str) -> None:
        """Raise APIError 400 if a text certainly has too many tokens."""
        if self._most is None or len(text) <= PIECE_CHARACTERS:
            return
        least = 0
        for piece in self._pieces(text):
            least += max(0, len(piece) - CUT_TOKENS)
            self.require(least, " (no more was counted)")

    def _pieces(self, text: str) -> Iterator[list[int]]:
        for start in range(0, len(text), PIECE_CHARACTERS):
            yield self._tokenizer.encode(text[start : start + PIECE_CHARACTERS])


def fit_context(
    arguments: GenerationArguments,
    prompt: Prompt,
    loaded: LoadedModel,
    options: ServerOptions,
    param: str,
) -> None:
    """Lower `max_tokens` to what the model's context holds behind a prompt. An option for longer
    prompts says that the model takes more than its config names: then nothing is known.

    Raises:
        APIError: 400, the prompt leaves no room for a token, and some are to be generated.
    """
    length, tokens = loaded.context_length, len(prompt.tokens)
    if length is None or (options.max_prompt_tokens or 0) > length or not arguments.max_tokens:
        return
    if tokens >= length:
        context = f"beside an answer, in the context length of {length} tokens: shorten it"
        raise _too_long(tokens, length - 1, context, param)
    arguments.max_tokens = min(arguments.max_tokens, length - tokens)


def _too_long(tokens: int, most: int, more: str, param: str) -> APIError:
    """400, in the words of Anthropic's API, by which coding agents notice that they must compact a
    conversation."""
    return APIError(
        400,
        f"prompt is too long: {tokens} tokens > {most} maximum {more}",
        param=param,
        code="context_length_exceeded",
    )
