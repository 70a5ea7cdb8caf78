"""The bodies of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
    with_config,
)

from paged_kv.server.http.schema import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
    ChatFields,
    Effort,
    MostTokens,
    Name,
    OpenAIFields,
    StrictDict,
    StrictModel,
    at_most,
)

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

# As at OpenAI.
MOST_METADATA = 16


class InputText(StrictDict):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: NotRequired[Any]


class OutputText(StrictDict):
    """A text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: NotRequired[Any]
    logprobs: NotRequired[Any]
    parsed: NotRequired[Any]


class Refusal(StrictDict):
    """A refusal in an earlier answer of another server."""

    type: Literal["refusal"]
    refusal: str


class InputImage(StrictDict):
    type: Literal["input_image"]
    image_url: str
    detail: NotRequired[Any]
    file_id: NotRequired[None]
    prompt_cache_breakpoint: NotRequired[Any]


_Part = Annotated[InputText | OutputText | Refusal | InputImage, Field(discriminator="type")]
_Shown = Annotated[InputText | InputImage, Field(discriminator="type")]


class _Item(StrictDict):
    id: NotRequired[str | None]
    status: NotRequired[str | None]


class Message(_Item):
    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | Annotated[list[_Part], Field(fail_fast=True)], at_most(MOST_PARTS)]
    phase: NotRequired[str | None]


class _Call(_Item):
    """A call in an earlier answer."""

    call_id: str
    name: str
    namespace: NotRequired[str | None]
    caller: NotRequired[Any]


class FunctionCall(_Call):
    type: Literal["function_call"]
    arguments: str
    parsed_arguments: NotRequired[Any]


class CustomCall(_Call):
    type: Literal["custom_tool_call"]
    input: str


class CallOutput(_Item):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str | Annotated[list[_Shown], Field(fail_fast=True)], at_most(MOST_PARTS)]
    name: NotRequired[str | None]
    caller: NotRequired[Any]


class ReasoningText(StrictDict):
    """A thought, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """What the model thought in an earlier answer."""

    type: Literal["reasoning"]
    summary: NotRequired[Annotated[list[ReasoningText], at_most(MOST_PARTS)] | None]
    content: NotRequired[Annotated[list[ReasoningText], at_most(MOST_PARTS)] | None]
    encrypted_content: NotRequired[str | None]


class ItemReference(StrictDict):
    """An item of a kept response, by its id."""

    type: NotRequired[Literal["item_reference"] | None]
    id: str


def _kind_of(item: Any) -> Any:
    if not isinstance(item, dict):
        return None
    return item.get("type") or ("message" if "role" in item else "item_reference")


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of),
]


class _Tool(StrictDict):
    """A tool that the client runs. The model sees deferred ones too: it cannot search for them."""

    name: Name
    description: NotRequired[str | None]
    defer_loading: NotRequired[bool | None]
    allowed_callers: NotRequired[list[Literal["direct"]] | None]


class FunctionTool(_Tool):
    """A tool that takes an object. `output_schema` means nothing to templates."""

    type: Literal["function"]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]
    output_schema: NotRequired[Any]


class AnyInput(StrictDict):
    type: Literal["text"]


class GrammarInput(StrictDict):
    """What the input of a custom tool must fit. The model is told, and nothing keeps it to that."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(_Tool):
    """A tool that takes a text."""

    type: Literal["custom"]
    format: NotRequired[Annotated[AnyInput | GrammarInput, Field(discriminator="type")] | None]


_ClientTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(StrictDict):
    """Tools with a common name before theirs."""

    type: Literal["namespace"]
    name: Name
    description: NotRequired[str | None]
    tools: Annotated[list[_ClientTool], Field(fail_fast=True), at_most(MOST_TOOLS)]


@with_config(ConfigDict(strict=True, extra="allow"))
class HostedTool(StrictDict):
    """A tool that OpenAI runs, or whose calls have a form of their own: it is left out."""

    type: Literal[
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


ResponsesTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | HostedTool, Field(discriminator="type")
]


class NamedTool(StrictDict):
    """The one tool that the model must call."""

    type: Literal["function", "custom"]
    name: Name


class Reasoning(StrictModel):
    """How much the model thinks. The answer has the thoughts, and not a summary, and the template
    gets those of all turns."""

    effort: Effort | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Format(StrictModel):
    """What the text must fit."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError('"schema" is needed with the type "json_schema"')
        return self


class TextConfig(StrictModel):
    """The form of the text."""

    format: Format | None = None
    # It means nothing here: see `FOREIGN`.
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(OpenAIFields, ChatFields):
    """A body of /v1/responses."""

    without_meaning: ClassVar = frozenset(
        {
            *("access_programs", "client_metadata", "max_tool_calls", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "service_tier", "user"),
        }
    )
    only: ClassVar[Mapping[str, Any]] = {
        "background": False,
        "context_management": [],
        "truncation": "disabled",
    }

    input: Annotated[
        str | Annotated[list[Item], Field(min_length=1, fail_fast=True)], at_most(MOST_MESSAGES)
    ]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: MostTokens | None = None
    tools: Annotated[list[ResponsesTool], at_most(MOST_TOOLS)] = Field(default_factory=list)
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None,
        at_most(16),
    ] = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    metadata: Annotated[
        dict[str, Annotated[str, StringConstraints(max_length=512)]] | None, at_most(MOST_METADATA)
    ] = None

    @property
    def items(self) -> list[Any]:
        """The input as items; some may be references."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input)
