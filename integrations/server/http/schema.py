"""The schemas of request bodies: OpenAI's fields and mlx-lm's.

Types are strict, as in JSON: "5" is not a number. Unknown fields are ignored. A field that is null
means the same as a missing one.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, Required

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from typing_extensions import TypedDict

DEFAULT_MODEL = "default_model"

# Far beyond any logit, and small enough for float16: no sum of such numbers is infinite or NaN.
LARGEST_LOGIT = 1e4
# Counts end up in 32-bit integers.
LARGEST_COUNT = 2**31 - 1
# Far below this, mlx-lm's 1/temperature overflows float32; vLLM has the same limit.
LEAST_TEMPERATURE = 1e-5
MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
MOST_STOPS = 64

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Share = Annotated[float, Field(ge=0, le=1)]
Logit = Annotated[float, Field(ge=-LARGEST_LOGIT, le=LARGEST_LOGIT)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = _STRICT

    include_usage: bool | None = None


class Body(BaseModel):
    """The fields that all requests for completions have."""

    model_config = _STRICT

    model: Name | None = None
    draft_model: Name | None = None
    adapters: Name | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=256)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None

    logit_bias: dict[TokenKey, Logit] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=LARGEST_LOGIT)] | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Logit | None = None
    presence_context_size: Count | None = None
    frequency_penalty: Logit | None = None
    frequency_context_size: Count | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MOST_TOP_LOGPROBS)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _plain_stop(cls, stop: Any) -> Any:
        texts = [stop] if isinstance(stop, str) else stop
        if texts is not None and not _are(str, texts):
            raise ValueError("a string or a list of strings is needed")
        if texts and len(texts) > MOST_STOPS:
            raise ValueError(f"at most {MOST_STOPS} stop sequences are possible")
        return stop

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
        logprobs: the number of alternatives to list for each token, as in OpenAI's API; or whether
            to list log probabilities, as in mlx-lm's.
    """

    prompt: Any
    logprobs: bool | Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @field_validator("prompt")
    @classmethod
    def _plain_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or (prompt and (_are(str, prompt) or _are(int, prompt))):
            return prompt
        if prompt and _are(list, prompt) and all(each and _are(int, each) for each in prompt):
            return prompt
        raise ValueError("a text, a list of token ids, or a list of either is needed")

    @field_validator("prompt")
    @classmethod
    def _few_prompts(cls, prompt: Any) -> Any:
        if len(_prompts(prompt)) > MOST_CHOICES:
            raise ValueError(f"at most {MOST_CHOICES} prompts are possible in one request")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        return _prompts(self.prompt)


class Part(TypedDict):
    """One part of a message's content."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]  # pydantic's name for it

    type: Required[str]
    text: NotRequired[str]


class Message(TypedDict):
    """A chat message; a model's chat template may read further fields."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]  # pydantic's name for it

    role: Required[str]
    content: NotRequired[str | list[Part] | None]
    tool_calls: NotRequired[list[dict[str, Any]] | None]


class ChatBody(Body):
    """A request body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    role_mapping: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None


def _prompts(prompt: Any) -> list[str | list[int]]:
    one = isinstance(prompt, str) or _are(int, prompt)
    return [prompt] if one else prompt


def _are(kind: type, values: Any) -> bool:
    """Whether `values` is a list of exactly this type; a bool is not an int."""
    return isinstance(values, list) and all(type(value) is kind for value in values)
