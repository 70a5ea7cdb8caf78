"""The schemas of request bodies: OpenAI's fields and mlx-lm's.

Types are strict, as in JSON: "5" is not a number. A field that is null means the same as a missing
one; `known_fields` says which other fields a body may have. Every list and object has a limit, and
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
)
from typing_extensions import TypedDict

from paged_kv.server.http.output_format import (
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
)

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


Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
# Of tokens to generate: a number, or NO_LIMIT.
AnyTokens = Annotated[int, Field(ge=NO_LIMIT, le=LARGEST_COUNT)]
MostTokens = Annotated[AnyTokens, AfterValidator(_not_zero)]
Share = Annotated[float, Field(ge=0, le=1)]
Logit = Annotated[float, Field(ge=-LARGEST_LOGIT, le=LARGEST_LOGIT)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
SessionName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(BaseModel):
    """Options of a stream. `include_obfuscation` means nothing: no chunk is padded."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(BaseModel):
    """The fields that all requests for completions have."""

    model_config = _STRICT

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    model: Name | None = None
    draft_model: Name | None = None
    adapters: Name | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=256)] | None = None
    store: bool | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    prompt_cache_key: SessionName | None = None
    session_id: SessionName | None = None

    priority: Annotated[int, Field(ge=-LARGEST_COUNT, le=LARGEST_COUNT)] | None = None

    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, at_most(MOST_NAMES)] = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    stop: str | list[str] | None = None
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
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None

    logit_bias: Annotated[dict[TokenKey, Logit] | None, at_most(MOST_BIASES)] = None
    repetition_penalty: Annotated[float, Field(ge=0, le=LARGEST_LOGIT)] | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Logit | None = None
    presence_context_size: Count | None = None
    frequency_penalty: Logit | None = None
    frequency_context_size: Count | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MOST_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _plain_stop(cls, stop: Any) -> Any:
        texts = [stop] if isinstance(stop, str) else stop
        if texts is not None and not _are(str, texts):
            raise ValueError("a string or a list of strings is needed")
        if texts and (len(texts) > MOST_STOPS or sum(map(len, texts)) > MOST_STOP_CHARACTERS):
            raise ValueError(
                f"{len(texts):,} texts of {sum(map(len, texts)):,} characters were given, and at "
                f"most {MOST_STOPS} of {MOST_STOP_CHARACTERS:,} in all are possible"
            )
        return stop

    @field_validator("session_id")
    @classmethod
    def _one_session(cls, session: str | None, info: ValidationInfo) -> str | None:
        key = info.data.get("prompt_cache_key")
        if None not in (session, key) and session != key:
            raise ValueError("prompt_cache_key names another session: send one of the two")
        return session

    @property
    def session(self) -> str | None:
        """The session that the request is part of."""
        return self.session_id or self.prompt_cache_key

    @property
    def stop_words(self) -> list[str]:
        """The stop texts that are not empty; a choice ends before any of them."""
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [word for word in words if word]

    @property
    def biases(self) -> dict[int, float]:
        """The logit biases by token id."""
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


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
        return _prompts(self.prompt)


class PrefillBody(TextBody):
    """A request body of /v1/prefill: a prompt whose pages another server waits for."""


_NO_PROMPT = "a text, a list of token ids, or a list of either is needed"

_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MOST_TOOLS)]


class Part(TypedDict):
    """One part of a message's content."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]  # pydantic's name for it

    type: Required[str]
    text: NotRequired[str]


class Message(TypedDict):
    """A chat message; a model's chat template may read further fields."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]  # pydantic's name for it

    role: Required[str]
    content: NotRequired[
        Annotated[str | Annotated[list[Part], Field(fail_fast=True)] | None, at_most(MOST_PARTS)]
    ]
    tool_calls: NotRequired[_Objects | None]


class ChatBody(Body):
    """A request body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MOST_MESSAGES)]
    tools: _Objects | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    role_mapping: Annotated[dict[str, str] | None, at_most(MOST_NAMES)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MOST_NAMES)] = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _effort_shown(self) -> Self:
        named = _effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})
        self.chat_template_kwargs = named or None
        return self

    @property
    def has_images(self) -> bool:
        """Whether a message has a part that is not a text."""
        contents = [message.get("content") for message in self.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return any(part["type"] != "text" for part in parts)


def _effort_variables(effort: Effort | None) -> dict[str, Any]:
    """The variables of chat templates for an effort, by the names that models have for them."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def _prompts(prompt: Any) -> list[str | list[int]]:
    one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if one else prompt


def _are(kind: type, values: Any) -> bool:
    """Whether `values` is a list of exactly this type; a bool is not an int."""
    return isinstance(values, list) and all(type(value) is kind for value in values)
