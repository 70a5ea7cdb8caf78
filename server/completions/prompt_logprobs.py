"""Log probabilities in OpenAI's form, and those of a prompt's tokens: `echo` and `prompt_logprobs`,
as vLLM has them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from paged_kv.server.completions.interface import Choice
from paged_kv.server.engine.jobs import Job, Prompt, ScoredToken, Token, TopToken
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.api_errors import wrong_value
from paged_kv.server.http.schema import Body, TextBody

# OpenAI's log probability of an impossible token: JSON has no infinity.
LEAST_LOGPROB = -9999.0


class Logprobs:
    """The descriptions of one answer's tokens.

    Args:
        tokenizer: gives the texts of tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Log probabilities name the same tokens again and again.
        self.text_of = functools.cache(self._decoded)

    def of(self, token: Token) -> dict[str, Any]:
        """A generated token and the likeliest ones in its place."""
        top = [self._described(each.token, each.logprob) for each in token.top]
        return {**self._described(token.token, token.logprob), "top_logprobs": top}

    def _described(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.text_of(token)
        # The tokenizer does not give the bytes of a token that is a part of a character.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"id": token, "token": text, "bytes": octets, "logprob": bounded(logprob)}

    def _decoded(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


def bounded(logprob: float | None) -> float | None:
    """A log probability that JSON can hold, at least LEAST_LOGPROB."""
    if logprob is None:
        return None
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


# Of all prompts of a request together. Each takes about 100 bytes until the answer is written.
MOST_SCORES = 1 << 20


def prompt_logprobs_of(body: Body, logprobs: int | None) -> int | None:
    """How many of the likeliest tokens to list for each token of the prompts; None if nothing is
    to be computed of them.

    Args:
        logprobs: the same of generated tokens.

    Raises:
        APIError: 400, they cannot be streamed.
    """
    if body.prompt_logprobs is not None and body.stream:
        raise wrong_value(
            "prompt_logprobs: these are not streamed: leave out stream", "prompt_logprobs"
        )
    echoed = logprobs if isinstance(body, TextBody) and body.echo else None
    counts = [each for each in (body.prompt_logprobs, echoed) if each is not None]
    return max(counts, default=None)


def require_scorable(prompt: Prompt, loaded: LoadedModel, count: int, most: int) -> None:
    """Check that the log probabilities of a prompt can be told, `count` likely ones for each token.

    Raises:
        APIError: 400, it is not computed in a batch, or they are more than `most`.
    """
    if prompt.media is not None or not loaded.is_batchable:
        raise wrong_value(
            "prompt_logprobs: there are none of prompts with images, and none with this model",
            "prompt_logprobs",
        )
    if (number := len(prompt.tokens) * (count + 1)) > most:
        raise wrong_value(
            f"prompt_logprobs: a prompt of {len(prompt.tokens):,} tokens with {count} likely ones "
            f"each has {number:,} log probabilities, and at most {most:,} are possible: send "
            "shorter or fewer prompts",
            "prompt_logprobs",
        )


def first_part(body: Body, job: Job, number: int, tokenizer: Any) -> Choice:
    """What a choice has before its first token: of the prompt."""
    choice = Choice(number, prompt=job.scored if body.prompt_logprobs is not None else None)
    if isinstance(body, TextBody) and body.echo:
        assert job.prompt is not None, "the choice has begun"
        prompt = body.prompts[job.first_choice // job.choices]
        choice.text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        if job.arguments.logprobs:
            most = job.arguments.top_logprobs
            choice.tokens = [
                Token(number, each.token, each.logprob, each.top[:most]) for each in job.scored
            ]
    return choice


def described(
    scored: Sequence[ScoredToken], count: int, text_of: Any
) -> list[dict[str, Any] | None]:
    """A prompt's log probabilities in vLLM's form: for each token but the first one, those of
    itself and of the `count` likeliest ones, by their ids."""

    def of(token: int, logprob: float | None, rank: int | None) -> dict[str, Any]:
        return {"logprob": bounded(logprob), "rank": rank, "decoded_token": text_of(token)}

    def listed(each: ScoredToken) -> dict[str, Any] | None:
        if each.logprob is None:
            return None
        top: Sequence[TopToken] = each.top[:count]
        likely = {str(it.token): of(it.token, it.logprob, at) for at, it in enumerate(top, 1)}
        return {str(each.token): of(each.token, each.logprob, each.rank)} | likely

    return list(map(listed, scored))
