"""The schemas of request bodies: what all interfaces share, and OpenAI's completions.

Types are strict, as in JSON: "5" is not a number. A field that is null means the same as a missing
one; `request_body` says which other fields a body may have. Every list and object has a limit, and
is not read beyond its first fault: pydantic would make an error of each of a million wrong items.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

DEFAULT_MODEL = "default_model"

# How much a model thinks, as OpenAI's clients say it.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Far beyond any logit, and small enough for float16: no sum of such numbers is infinite or NaN.
LARGEST_LOGIT = 1e4
# Counts end up in 32-bit integers.
LARGEST_COUNT = 2**31 - 1
# As many tokens as fit.
NO_LIMIT = -1
# Far below this, mlx-lm's 1/temperature overflows float32; vLLM has the same limit.
LEAST_TEMPERATURE = 1e-5
MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
# OpenAI takes 4 stop texts. A search for them takes memory for each character.
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 4096
MOST_STOP_TOKENS = 128
# As at OpenAI. Some chat templates look back at all messages for each message.
MOST_MESSAGES = 2048
MOST_PARTS = 2048
MOST_TOOLS = 1024
# Enough to forbid all tokens of a script in a vocabulary of 256,000.
MOST_BIASES = 65_536
MOST_NAMES = 128
# Large schemas of tools have tens of thousands of characters.
MOST_GRAMMAR_CHARACTERS = 1 << 18
MOST_ALTERNATIVES = 16_384


def at_most(most: int) -> BeforeValidator:
    """Refuses a longer list or object before its items are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"it has {len(value):,} items, and at most {most:,} are possible")
        return value

    return BeforeValidator(check)


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError(f"at least one token is generated here, and {NO_LIMIT} means no limit")
    return value


def few_stops(stop: Any) -> Any:
    """Refuses what is no stop text, or too many or too long ones."""
    texts = [stop] if isinstance(stop, str) else stop
    if texts is not None and not _are(str, texts):
        raise ValueError("a string or a list of strings is needed")
    if texts and (len(texts) > MOST_STOPS or sum(map(len, texts)) > MOST_STOP_CHARACTERS):
        raise ValueError(
            f"{len(texts):,} texts of {sum(map(len, texts)):,} characters were given, and at "
            f"most {MOST_STOPS} of {MOST_STOP_CHARACTERS:,} in all are possible"
        )
    return stop


Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
# Of tokens to generate: a number, or NO_LIMIT.
AnyTokens = Annotated[int, Field(ge=NO_LIMIT, le=LARGEST_COUNT)]
MostTokens = Annotated[AnyTokens, AfterValidator(_not_zero)]
Share = Annotated[float, Field(ge=0, le=1)]
Logit = Annotated[float, Field(ge=-LARGEST_LOGIT, le=LARGEST_LOGIT)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
SessionName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MOST_GRAMMAR_CHARACTERS)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_OPEN = ConfigDict(strict=True, extra="allow")


class StrictModel(BaseModel):
    """An object within a body: it has no fields but its own."""

    model_config = _STRICT


@with_config(_STRICT)
class StrictDict(TypedDict):
    """An object within a body that may come in thousands, and stays a dict."""


class NamedSchema(StrictModel):
    """A JSON schema with a name, as OpenAI's clients send it. `name`, `description` and `strict`
    change nothing: every answer fits the schema."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(StrictModel):
    """OpenAI's field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('"json_schema" is needed with the type "json_schema", and only then')
        return self


class NamedFunction(StrictModel):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]


class NamedTool(StrictModel):
    """The tool that an answer must call, in OpenAI's field `tool_choice`."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class StructuredOutputs(StrictModel):
    """vLLM's field `structured_outputs`: one of these.

    Attributes:
        json_schema: a JSON schema, or its text; `json` in requests.
        json_object: true for any JSON object.
        regex: a regular expression that matches the whole answer.
        choice: the possible answers.
        grammar: a grammar in llguidance's Lark syntax, or in llama.cpp's GBNF.
    """

    json_schema: Annotated[dict[str, Any] | GrammarText | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: GrammarText | None = None
    choice: Annotated[
        list[Annotated[str, StringConstraints(max_length=MOST_GRAMMAR_CHARACTERS)]] | None,
        Field(min_length=1, max_length=MOST_ALTERNATIVES, fail_fast=True),
    ] = None
    grammar: GrammarText | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(given := [name for name, value in self if value is not None]) != 1:
            raise ValueError(f"one of json, json_object, regex, choice, grammar is needed: {given}")
        return self


class StreamOptions(StrictModel):
    """Options of a stream. `include_obfuscation` means nothing: no chunk is padded."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class BodyFields(BaseModel):
    """A body of any request; `request_body` says which other fields it may have."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class SharedFields(BodyFields):
    """The fields that mean the same in all four interfaces."""

    model: Name | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    stream: bool | None = None
    stop_token_ids: Annotated[
        list[Count] | None, Field(fail_fast=True), at_most(MOST_STOP_TOKENS)
    ] = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=LARGEST_LOGIT)] | None = None


class ChatFields(SharedFields):
    """The fields that mean the same in all interfaces of conversations."""

    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MOST_NAMES)] = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class OpenAIFields(SharedFields):
    """The fields that mean the same in OpenAI's interfaces."""

    store: bool | None = None
    prompt_cache_key: SessionName | None = None
    session_id: SessionName | None = None
    priority: Annotated[int, Field(ge=-LARGEST_COUNT, le=LARGEST_COUNT)] | None = None
    stream_options: Annotated[StreamOptions | None, at_most(MOST_NAMES)] = None

    @field_validator("session_id")
    @classmethod
    def _one_session(cls, session: str | None, info: ValidationInfo) -> str | None:
        key = info.data.get("prompt_cache_key")
        if None not in (session, key) and session != key:
            raise ValueError("prompt_cache_key names another session: send one of the two")
        return session


class Body(OpenAIFields):
    """What is to be generated: the fields of completions and chat completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    draft_model: Name | None = None
    adapters: Name | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=256)] | None = None

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    stop: Annotated[str | list[str] | None, BeforeValidator(few_stops)] = None

    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    logit_bias: Annotated[dict[TokenKey, Logit] | None, at_most(MOST_BIASES)] = None
    repetition_context_size: Count | None = None
    presence_penalty: Logit | None = None
    presence_context_size: Count | None = None
    frequency_penalty: Logit | None = None
    frequency_context_size: Count | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MOST_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def stop_words(self) -> list[str]:
        """The stop texts that are not empty; a choice ends before any of them."""
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [word for word in words if word]


class TextBody(Body):
    """A request body of /v1/completions.

    Attributes:
        prompt: a text, its token ids, or a list of either.
        echo: whether a choice begins with its prompt.
        logprobs: the number of alternatives to list for each token, as in OpenAI's API; or whether
            to list log probabilities, as in mlx-lm's.
    """

    prompt: Any
    # 0 generates nothing; at OpenAI too, and in no conversation.
    max_tokens: AnyTokens | None = None
    echo: bool | None = None
    logprobs: bool | Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @field_validator("prompt")
    @classmethod
    def _plain_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or (prompt and _are(int, prompt)):
            return prompt
        if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
            raise ValueError(_NO_PROMPT)
        if len(prompt) > MOST_CHOICES:
            raise ValueError(f"at most {MOST_CHOICES} prompts are possible in one request")
        if _are(str, prompt) or all(each and _are(int, each) for each in prompt):
            return prompt
        raise ValueError(_NO_PROMPT)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt


class PrefillBody(TextBody):
    """A request body of /v1/prefill: a prompt whose pages another server waits for."""


_NO_PROMPT = "a text, a list of token ids, or a list of either is needed"

_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MOST_TOOLS)]


@with_config(_OPEN)
class Part(TypedDict):
    type: Required[str]
    text: NotRequired[str]


@with_config(_OPEN)
class Message(TypedDict):
    """A chat message; a model's chat template may read further fields."""

    role: Required[str]
    content: NotRequired[
        Annotated[str | Annotated[list[Part], Field(fail_fast=True)] | None, at_most(MOST_PARTS)]
    ]
    tool_calls: NotRequired[_Objects | None]


class ChatBody(Body, ChatFields):
    """A request body of /v1/chat/completions, and what bodies of Messages and of Responses become:
    see `chat_request`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MOST_MESSAGES)]
    tools: _Objects | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    role_mapping: Annotated[dict[str, str] | None, at_most(MOST_NAMES)] = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None

    @property
    def has_images(self) -> bool:
        """Whether a message has a part that is not a text."""
        contents = [message.get("content") for message in self.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return any(part["type"] != "text" for part in parts)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template; for the effort by the names that models have."""
        given, effort = self.chat_template_kwargs or {}, self.reasoning_effort
        if effort is None:
            return given
        named = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
        return named | given


def _are(kind: type, values: Any) -> bool:
    """Whether `values` is a list of exactly this type; a bool is not an int."""
    return isinstance(values, list) and all(type(value) is kind for value in values)
