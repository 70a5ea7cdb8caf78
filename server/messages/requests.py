"""The bodies of Anthropic's Messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from paged_kv.server.http.schema import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_STOPS,
    MOST_TOOLS,
    ChatFields,
    MostTokens,
    Name,
    Positive,
    SessionName,
    StrictDict,
    StrictModel,
    at_most,
    few_stops,
)


class CacheControl(StrictDict):
    """A mark after which a prompt may be cached; the server caches all of it anyway."""

    type: Literal["ephemeral"]
    ttl: NotRequired[Literal["5m", "1h"] | None]


class _Block(StrictDict):
    cache_control: NotRequired[CacheControl | None]


class TextBlock(_Block):
    """A text. Its citations mean nothing: the server has no documents to cite."""

    type: Literal["text"]
    text: str
    citations: NotRequired[Any]


class Base64Source(StrictDict):
    type: Literal["base64"]
    media_type: Annotated[str, StringConstraints(pattern=r"^image/[a-z+.-]{1,32}$")]
    data: str


class URLSource(StrictDict):
    type: Literal["url"]
    url: str


class ImageBlock(_Block):
    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Field(discriminator="type")]


class TextSource(StrictDict):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class ContentSource(StrictDict):
    type: Literal["content"]
    content: Annotated[str | Annotated[list[TextBlock], Field(fail_fast=True)], at_most(MOST_PARTS)]


class DocumentBlock(_Block):
    """A document, as far as it is text."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: NotRequired[str]
    context: NotRequired[str]
    citations: NotRequired[Any]


class SearchResultBlock(_Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(fail_fast=True), at_most(MOST_PARTS)]
    citations: NotRequired[Any]


class ThinkingBlock(_Block):
    """What the model thought in an earlier answer. The server signs nothing."""

    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[Any]


class RedactedThinkingBlock(_Block):
    """Thoughts of another server, which only that can read: they are left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    # An object, unless an answer was cut.
    input: Any
    caller: NotRequired[Any]


_AnyText = TextBlock | DocumentBlock | SearchResultBlock
_Shown = Annotated[_AnyText | ImageBlock, Field(discriminator="type")]
_ShownBlocks = Annotated[list[_Shown], Field(fail_fast=True)]


class ToolResultBlock(_Block):
    """What a call gave. Chat templates have no place for `is_error`: the content tells."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[Annotated[str | _ShownBlocks | None, at_most(MOST_PARTS)]]
    is_error: NotRequired[bool | None]


_UserBlock = Annotated[_AnyText | ImageBlock | ToolResultBlock, Field(discriminator="type")]
_AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]
_Texts = Annotated[str | Annotated[list[TextBlock], Field(fail_fast=True)], at_most(MOST_PARTS)]


class UserMessage(StrictDict):
    role: Literal["user"]
    content: Annotated[
        str | Annotated[list[_UserBlock], Field(fail_fast=True)], at_most(MOST_PARTS)
    ]


class AssistantMessage(StrictDict):
    role: Literal["assistant"]
    content: Annotated[
        str | Annotated[list[_AssistantBlock], Field(fail_fast=True)], at_most(MOST_PARTS)
    ]


class SystemMessage(StrictDict):
    """A message of the operator within the conversation."""

    role: Literal["system"]
    content: _Texts


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class MessagesTool(StrictDict):
    type: NotRequired[Literal["custom"] | None]
    name: Name
    description: NotRequired[str | None]
    input_schema: dict[str, Any]
    strict: NotRequired[bool | None]
    cache_control: NotRequired[CacheControl | None]
    eager_input_streaming: NotRequired[bool | None]
    defer_loading: NotRequired[Literal[False] | None]
    allowed_callers: NotRequired[list[Literal["direct"]] | None]


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _is_named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a choice of type 'tool' has the name of a tool, and no other has one")
        return self


class Thinking(StrictModel):
    """Whether the model thinks first. No budget of tokens is kept."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptBody(ChatFields):
    """A body of /v1/messages/count_tokens: all that becomes the prompt."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MOST_MESSAGES)]
    max_tokens: MostTokens | None = None
    session_id: SessionName | None = None
    system: _Texts | None = None
    tools: Annotated[list[MessagesTool], at_most(MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(PromptBody):
    max_tokens: MostTokens
    stop_sequences: Annotated[
        list[str] | None, Field(fail_fast=True), at_most(MOST_STOPS), AfterValidator(few_stops)
    ] = None
