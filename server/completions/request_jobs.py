"""Turns a request into jobs for the generation thread, and reads their prompts.

Reader threads do this: the client chooses how long it takes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mlx_lm.server import (
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)

from paged_kv.prefix.keeping import inner_salt
from paged_kv.server.completions.interface import APIRequest
from paged_kv.server.completions.output_constraint import constraint_of
from paged_kv.server.completions.prompt_logprobs import (
    MOST_SCORES,
    prompt_logprobs_of,
    require_scorable,
)
from paged_kv.server.completions.prompt_reader import (
    fit_context,
    read_chat,
    read_prefill,
    read_text,
)
from paged_kv.server.engine.jobs import Channel, Job, Prompt
from paged_kv.server.engine.paged_model_provider import LoadedModel, ModelKey
from paged_kv.server.engine.sampling import Ending
from paged_kv.server.http.api_errors import wrong_value
from paged_kv.server.http.schema import (
    LARGEST_COUNT,
    LEAST_TEMPERATURE,
    MOST_CHOICES,
    NO_LIMIT,
    Body,
    ChatBody,
    PrefillBody,
    TextBody,
)
from paged_kv.server.options import ServerOptions

Number = TypeVar("Number", int, float)


def make_jobs(
    request: APIRequest,
    model: ModelKey,
    salt: Hashable,
    request_id: str,
    options: ServerOptions,
    channel: Channel,
) -> list[Job]:
    """The jobs of a request, one for each prompt, whose events go to the channel. No prompt is
    tokenized yet.

    Raises:
        APIError: 400, the request asks for too many choices, or for an answer of two forms.
    """
    body, choices = request.body, request.body.n or 1
    arguments = generation_arguments(body, options)
    constraint = constraint_of(body)
    ending = ending_of(body, arguments.max_tokens, is_free=constraint is None)
    prompts = body.prompts if isinstance(body, TextBody) else [""]
    if len(prompts) * choices > MOST_CHOICES:
        raise wrong_value(
            f"{len(prompts)} prompts of n={choices} choices were asked, and one request may have "
            f"{MOST_CHOICES} choices",
            "n",
        )
    scores = prompt_logprobs_of(body, arguments.top_logprobs if arguments.logprobs else None)
    jobs = []
    for number, prompt in enumerate(prompts):
        # Each prompt leaves room for another number of tokens.
        limits = replace(arguments)
        reading = partial(
            _read,
            request=request,
            prompt=prompt,
            arguments=limits,
            ending=ending,
            scores=None if scores is None else (scores, MOST_SCORES // len(prompts)),
            salt=inner_salt(salt),
            options=options,
        )
        job = Job(
            request_id=request_id,
            model=model,
            read=reading,
            arguments=limits,
            asked_tokens=arguments.max_tokens,
            ending=ending,
            prompt_logprobs=scores,
            choices=choices,
            first_choice=number * choices,
            salt=salt,
            session=body.session,
            channel=channel,
            constraint=constraint,
            priority=body.priority or 0,
        )
        jobs.append(job)
    return jobs


def generation_arguments(body: Body, options: ServerOptions) -> GenerationArguments:
    """mlx-lm's generation arguments, from a body and the server's defaults."""
    logprobs, top_logprobs = _logprobs(body)
    temperature = _either(body.temperature, options.temp)
    most = _either(body.max_completion_tokens, _either(body.max_tokens, options.max_tokens))
    return GenerationArguments(
        # Unused: the model's name is resolved before.
        model=ModelDescription("", "", ""),
        sampling=SamplingArguments(
            temperature=0.0 if temperature < LEAST_TEMPERATURE else temperature,
            top_p=_either(body.top_p, options.top_p),
            top_k=_either(body.top_k, options.top_k),
            min_p=_either(body.min_p, options.min_p),
            xtc_probability=_either(body.xtc_probability, 0.0),
            xtc_threshold=_either(body.xtc_threshold, 0.1),
        ),
        logits=LogitsProcessorArguments(
            logit_bias=body.biases,
            repetition_penalty=_either(body.repetition_penalty, 0.0),
            repetition_context_size=_either(body.repetition_context_size, 20),
            presence_penalty=_either(body.presence_penalty, 0.0),
            presence_context_size=_either(body.presence_context_size, 20),
            frequency_penalty=_either(body.frequency_penalty, 0.0),
            frequency_context_size=_either(body.frequency_context_size, 20),
        ),
        stop_words=body.stop_words,
        max_tokens=LARGEST_COUNT if most == NO_LIMIT else most,
        num_draft_tokens=_either(body.num_draft_tokens, options.num_draft_tokens),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        seed=body.seed,
        chat_template_kwargs=None,
    )


def ending_of(body: Body, max_tokens: int, *, is_free: bool) -> Ending:
    """The tokens that end an answer.

    Args:
        max_tokens: of the request, or the default.
        is_free: whether the answer may be any text.

    Raises:
        APIError: 400, they cannot end it as is asked.
    """
    ending = Ending(tuple(body.stop_token_ids or ()), body.ignore_eos is True, body.min_tokens or 0)
    if ending.min_tokens > max_tokens:
        raise wrong_value(
            f"min_tokens={ending.min_tokens}, and at most {max_tokens} are generated: lower it, or "
            "raise max_tokens",
            "min_tokens",
        )
    field = "ignore_eos" if ending.ignores_end else "min_tokens"
    if not is_free and (ending.ignores_end or ending.min_tokens):
        raise wrong_value(
            f"{field}: an answer that must have a form ends where the form does: leave out one of "
            "the two",
            field,
        )
    return ending


def require_bounds(arguments: GenerationArguments, ending: Ending, vocab_size: int) -> None:
    """Raise APIError if a token id or a count is beyond the model's vocabulary."""
    known = f"the model knows token ids from 0 to {vocab_size - 1}"
    for token in arguments.logits.logit_bias or ():
        if token >= vocab_size:
            raise wrong_value(f"logit_bias has token {token}, and {known}", "logit_bias")
    for token in ending.stop_token_ids:
        if token >= vocab_size:
            raise wrong_value(f"stop_token_ids has token {token}, and {known}", "stop_token_ids")
    if arguments.sampling.top_k >= vocab_size:
        raise wrong_value(
            f"top_k={arguments.sampling.top_k} filters no token: {known}, and 0 means no limit",
            "top_k",
        )
    if arguments.top_logprobs > vocab_size:
        raise wrong_value(f"top_logprobs={arguments.top_logprobs}, and {known}", "top_logprobs")


def _read(
    loaded: LoadedModel,
    *,
    request: APIRequest,
    prompt: str | list[int],
    arguments: GenerationArguments,
    ending: Ending,
    scores: tuple[int, int] | None,
    salt: Hashable,
    options: ServerOptions,
) -> Prompt:
    """A job's prompt, behind which an answer fits.

    Args:
        prompt: of a completion; a chat has its messages.
        arguments: `max_tokens` is lowered to what fits.
        scores: how many likely tokens to list for each token of the prompt, and how many log
            probabilities it may have in all; None if none are asked for.
    """
    require_bounds(arguments, ending, loaded.vocab_size)
    body = request.body
    if isinstance(body, ChatBody):
        param = "messages"
        made = read_chat(
            loaded, body, options, request.marks, salt=salt, is_counted=request.is_counted
        )
    else:
        param = "prompt"
        read = read_prefill if isinstance(body, PrefillBody) else read_text
        made = read(loaded, prompt, options)
    if scores is not None:
        require_scorable(made, loaded, *scores)
    if not request.is_counted:
        fit_context(arguments, made, loaded, options, param)
    return made


def _logprobs(body: Body) -> tuple[bool, int]:
    """Whether the request asks for log probabilities, and for how many alternatives."""
    count = body.logprobs if isinstance(body, (TextBody, ChatBody)) else None
    if count is not None and not isinstance(count, bool):
        return True, count
    top = max(0, body.top_logprobs or 0)
    return bool(count) or top > 0, top


def _either(given: Number | None, default: Number) -> Number:
    return default if given is None else given
