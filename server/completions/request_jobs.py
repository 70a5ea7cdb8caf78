"""Turns a request into jobs for the generation thread, reads their prompts, and those of the turns
that may follow.

Reader threads do this: the client chooses how long it takes.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mlx_lm.server import (
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from paged_kv.integrations.grammar import grammars
from paged_kv.integrations.grammar.constraints import CallableTool, CallConstraint, Constraint
from paged_kv.integrations.grammar.grammars import Grammar
from paged_kv.prefix.keeping import inner_salt
from paged_kv.server.completions.chat_messages import thoughts, tool_call, tool_result
from paged_kv.server.completions.interface import APIRequest, Choice, Object
from paged_kv.server.completions.prompt_reader import fit_context, read_chat, read_text
from paged_kv.server.engine.jobs import Channel, Job, Prompt
from paged_kv.server.engine.next_turns import NextTurn
from paged_kv.server.engine.paged_model_provider import LoadedModel, ModelKey
from paged_kv.server.engine.sampling import Ending
from paged_kv.server.http.api_errors import shortened, wrong_value
from paged_kv.server.http.schema import (
    LARGEST_COUNT,
    LEAST_TEMPERATURE,
    MOST_CHOICES,
    MOST_GRAMMAR_CHARACTERS,
    NO_LIMIT,
    Body,
    ChatBody,
    NamedTool,
    PrefillBody,
    StructuredOutputs,
    TextBody,
)
from paged_kv.server.options import ServerOptions

Number = TypeVar("Number", int, float)

# Of all prompts of a request together. Each takes about 100 bytes until the answer is written.
MOST_SCORES = 1 << 20


def make_jobs(
    request: APIRequest,
    model: ModelKey,
    salt: Hashable,
    request_id: str,
    options: ServerOptions,
    channel: Channel,
) -> list[Job]:
    """The jobs of a request, one for each prompt, whose events go to the channel. No prompt is
    tokenized yet. Raises APIError 400: the request asks for too many choices, or for an answer of
    two forms."""
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
    most_scores = MOST_SCORES // len(prompts)
    return [
        Job(
            request_id=request_id,
            model=model,
            read=partial(_read, request, prompt, most_scores, options),
            # Each prompt leaves room for another number of tokens.
            arguments=replace(arguments),
            asked_tokens=arguments.max_tokens,
            ending=ending,
            prompt_logprobs=scores,
            choices=choices,
            first_choice=number * choices,
            salt=salt,
            session=body.session_id or body.prompt_cache_key,
            channel=channel,
            constraint=constraint,
            priority=body.priority or 0,
        )
        for number, prompt in enumerate(prompts)
    ]


def generation_arguments(body: Body, options: ServerOptions) -> GenerationArguments:
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
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
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


def constraint_of(body: Body) -> Constraint | CallConstraint | None:
    """What an answer to a request must fit; None for any text. Raises APIError 400: two fields say
    it, the grammar is too long, or a tool is to be called that there is not."""
    answer = _of_answer(body)
    return _of_calls(body, answer) if isinstance(body, ChatBody) else answer


def _of_calls(body: ChatBody, answer: Constraint | None) -> Constraint | CallConstraint | None:
    choice, tools = body.tool_choice or "auto", body.tools or []
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools:
        if named is not None or choice == "required":
            raise wrong_value("tool_choice: there are no tools to call: give some", "tool_choice")
        return answer
    known = [tool for each in tools if (tool := _tool(each)) is not None]
    called = tuple(tool for tool in known if named in (None, tool.name))
    if not called and named is not None:
        raise wrong_value(f"tool_choice: no tool is called {shortened(named)}", "tool_choice")
    if len(known) < len(tools) or not called:
        if choice != "auto":
            raise wrong_value("tools: each tool needs a function with a name", "tools")
        return answer
    several = body.parallel_tool_calls is not False and named is None
    choice = choice if isinstance(choice, str) else "required"
    return CallConstraint(called, choice, several, answer)


def _tool(tool: dict[str, Any]) -> CallableTool | None:
    """A tool of a request; None for one without a function."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        return None
    parameters = function.get("parameters") or {}
    return CallableTool(name, json.dumps(parameters)) if isinstance(parameters, dict) else None


def _of_answer(body: Body) -> Constraint | None:
    form, outputs = body.response_format, body.structured_outputs
    grammar, field = None, "response_format"
    if form is not None and form.json_schema is not None:
        grammar = grammars.json_schema(form.json_schema.json_schema)
    elif form is not None and form.type == "json_object":
        grammar = grammars.json_object()
    if outputs is not None:
        if grammar is not None:
            raise wrong_value(
                "response_format and structured_outputs both say what the answer must fit: give "
                "one",
                "structured_outputs",
            )
        grammar, field = _of_outputs(outputs), "structured_outputs"
    if grammar is None:
        return None
    if len(grammar.text) > MOST_GRAMMAR_CHARACTERS:
        raise wrong_value(
            f"{field} has {len(grammar.text):,} characters, and at most "
            f"{MOST_GRAMMAR_CHARACTERS:,} are possible",
            field,
        )
    return Constraint(grammar, field)


def _of_outputs(outputs: StructuredOutputs) -> Grammar:
    if outputs.regex is not None:
        return grammars.regex(outputs.regex)
    if outputs.choice is not None:
        return grammars.choice(outputs.choice)
    if outputs.grammar is not None:
        return grammars.lark(outputs.grammar)
    return grammars.json_object() if outputs.json_object else _schema(outputs.json_schema)


def _schema(schema: Any) -> Grammar:
    field = "structured_outputs.json"
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise wrong_value(f"{field}: no JSON: {error}", field) from None
    if not isinstance(schema, dict):
        raise wrong_value(f"{field}: a schema is a JSON object", field)
    return grammars.json_schema(schema)


def ending_of(body: Body, max_tokens: int, *, is_free: bool) -> Ending:
    """The tokens that end an answer of at most so many, which may be any text if it `is_free`.
    Raises APIError 400: they cannot end it as is asked."""
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
    biased = ("logit_bias", arguments.logits.logit_bias or ())
    for field, tokens in (biased, ("stop_token_ids", ending.stop_token_ids)):
        for token in tokens:
            if token >= vocab_size:
                raise wrong_value(f"{field} has token {token}, and {known}", field)
    if arguments.sampling.top_k >= vocab_size:
        raise wrong_value(
            f"top_k={arguments.sampling.top_k} filters no token: {known}, and 0 means no limit",
            "top_k",
        )
    if arguments.top_logprobs > vocab_size:
        raise wrong_value(f"top_logprobs={arguments.top_logprobs}, and {known}", "top_logprobs")


def prompt_logprobs_of(body: Body, logprobs: int | None) -> int | None:
    """How many of the likeliest tokens to list for each token of the prompts, beside `logprobs` for
    generated ones; None if nothing is to be computed of them. Raises APIError 400: they cannot be
    streamed."""
    if body.prompt_logprobs is not None and body.stream:
        raise wrong_value(
            "prompt_logprobs: these are not streamed: leave out stream", "prompt_logprobs"
        )
    echoed = logprobs if isinstance(body, TextBody) and body.echo else None
    counts = [each for each in (body.prompt_logprobs, echoed) if each is not None]
    return max(counts, default=None)


def require_scorable(prompt: Prompt, loaded: LoadedModel, count: int, most: int) -> None:
    """Check that the log probabilities of a prompt can be told, `count` likely ones for each token.
    Raises APIError 400: it is not computed in a batch, or they are more than `most`."""
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


def _read(
    request: APIRequest,
    prompt: str | list[int],
    most_scores: int,
    options: ServerOptions,
    job: Job,
    loaded: LoadedModel,
) -> Prompt:
    """A job's prompt, with at most so many log probabilities, behind which an answer fits:
    `max_tokens` of the job is lowered to that. The `prompt` is of a completion; a chat has its
    messages."""
    body, is_counted = request.body, request.is_counted
    require_bounds(job.arguments, job.ending, loaded.vocab_size)
    if isinstance(body, ChatBody):
        param, salt = "messages", inner_salt(job.salt)
        made = read_chat(loaded, body, options, request.marks, salt=salt, is_counted=is_counted)
    else:
        param = "prompt"
        made = read_text(loaded, prompt, options, is_published=isinstance(body, PrefillBody))
    if job.prompt_logprobs is not None:
        require_scorable(made, loaded, job.prompt_logprobs, most_scores)
    if not is_counted:
        fit_context(job.arguments, made, loaded, options, param)
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


# What the next prompt of a chat begins with: the chat and its answer as the template writes them,
# up to where the next message begins. That message is not known. So two chats are written, with two
# messages of its kind that begin differently, and what both begin with is what any such message
# follows. The kind is known: results follow calls, and otherwise the user speaks. These are
# contents of which no tokenizer joins the beginnings to what is before them in the same way.
_CONTENTS = ("a", "1")


def next_turn(
    request: APIRequest, job: Job, answer: Choice, options: ServerOptions
) -> NextTurn | None:
    """What to prepare behind an answer, as its client will send it back; None if its next turn
    cannot be known: of a completion, of one of several choices, and of a chat that has images or
    whose last message was continued."""
    body = request.body
    if not isinstance(body, ChatBody) or job.choices > 1 or body.has_images:
        return None
    if body.messages[-1]["role"] == "assistant" or body.add_generation_prompt is False:
        return None
    read = partial(_next_tokens, body, _message(answer), options, inner_salt(job.salt))
    return NextTurn(job.request_id, job.model, job.salt, job.session, read)


def _message(answer: Choice) -> Object:
    message: Object = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message |= thoughts(answer.reasoning)
    calls = [call for call in answer.calls if call.call_id]
    if calls:
        arguments = dict.fromkeys((call.index for call in calls), "")
        for piece in answer.calls:
            arguments[piece.index] += piece.arguments
        message["tool_calls"] = [
            tool_call(call.call_id, call.name, arguments[call.index]) for call in calls
        ]
    return message


def _next_tokens(
    body: ChatBody, answer: Object, options: ServerOptions, salt: Hashable, loaded: LoadedModel
) -> list[int]:
    """The tokens before the content of any next message. The `salt` is the one of `KeptTokens`.
    Raises APIError 400: the model's chat template refuses the chat, or it is too long."""

    def followed_by(content: str) -> Prompt:
        following: list[Any] = [
            tool_result(call["id"], content) for call in answer.get("tool_calls", ())
        ] or [{"role": "user", "content": content}]
        messages = [*body.messages, answer, *following]
        return read_chat(loaded, body.model_copy(update={"messages": messages}), options, salt=salt)

    first, second = map(followed_by, _CONTENTS)
    if first.media is not None:
        return []
    return first.tokens[: common_prefix(first.tokens, second.tokens)]
