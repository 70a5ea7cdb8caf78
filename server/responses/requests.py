"""The bodies of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    with_config,
)
from typing_extensions import TypedDict

from paged_kv.server.http.schema import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
    Effort,
    MostTokens,
    Name,
    at_most,
)

# Fields of chat completions that mean the same here. Those of the last lines are extensions.
SHARED = (
    *("model", "stream", "stream_options", "store", "temperature", "top_p", "parallel_tool_calls"),
    *("cache_salt", "chat_template_kwargs", "min_p", "priority", "repetition_penalty", "seed"),
    *("add_generation_prompt", "continue_final_message"),
    *("ignore_eos", "min_tokens", "stop_token_ids", "top_k"),
    *("prompt_cache_key", "session_id"),
)

# Fields that no token of an answer depends on.
WITHOUT_MEANING = frozenset(
    {
        *("access_programs", "client_metadata", "max_tool_calls", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "user"),
    }
)

# Fields that may have one value: what the server does anyway.
ONLY: Mapping[str, Any] = {
    "background": False,
    "context_management": [],
    "truncation": "disabled",
}

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

# As at OpenAI.
MOST_METADATA = 16

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@with_config(_STRICT)
class InputText(TypedDict):
    """A text."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: NotRequired[Any]


@with_config(_STRICT)
class OutputText(TypedDict):
    """A text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: NotRequired[Any]
    logprobs: NotRequired[Any]
    parsed: NotRequired[Any]


@with_config(_STRICT)
class Refusal(TypedDict):
    """A refusal in an earlier answer of another server."""

    type: Literal["refusal"]
    refusal: str


@with_config(_STRICT)
class InputImage(TypedDict):
    """An image, by its URL."""

    type: Literal["input_image"]
    image_url: str
    detail: NotRequired[Any]
    file_id: NotRequired[None]
    prompt_cache_breakpoint: NotRequired[Any]


_Part = Annotated[InputText | OutputText | Refusal | InputImage, Field(discriminator="type")]
_Shown = Annotated[InputText | InputImage, Field(discriminator="type")]


@with_config(_STRICT)
class Message(TypedDict):
    """A message of anyone."""

    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | Annotated[list[_Part], Field(fail_fast=True)], at_most(MOST_PARTS)]
    id: NotRequired[str | None]
    status: NotRequired[str | None]
    phase: NotRequired[str | None]


@with_config(_STRICT)
class _Call(TypedDict):
    """A call in an earlier answer."""

    call_id: str
    name: str
    namespace: NotRequired[str | None]
    caller: NotRequired[Any]
    id: NotRequired[str | None]
    status: NotRequired[str | None]


@with_config(_STRICT)
class FunctionCall(_Call):
    """A call of a function."""

    type: Literal["function_call"]
    arguments: str
    parsed_arguments: NotRequired[Any]


@with_config(_STRICT)
class CustomCall(_Call):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str


@with_config(_STRICT)
class CallOutput(TypedDict):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str | Annotated[list[_Shown], Field(fail_fast=True)], at_most(MOST_PARTS)]
    name: NotRequired[str | None]
    caller: NotRequired[Any]
    id: NotRequired[str | None]
    status: NotRequired[str | None]


@with_config(_STRICT)
class ReasoningText(TypedDict):
    """A thought, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


@with_config(_STRICT)
class ReasoningItem(TypedDict):
    """What the model thought in an earlier answer."""

    type: Literal["reasoning"]
    summary: NotRequired[Annotated[list[ReasoningText], at_most(MOST_PARTS)] | None]
    content: NotRequired[Annotated[list[ReasoningText], at_most(MOST_PARTS)] | None]
    encrypted_content: NotRequired[str | None]
    id: NotRequired[str | None]
    status: NotRequired[str | None]


@with_config(_STRICT)
class ItemReference(TypedDict):
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


@with_config(_STRICT)
class _Tool(TypedDict):
    """A tool that the client runs. The model sees deferred ones too: it cannot search for them."""

    name: Name
    description: NotRequired[str | None]
    defer_loading: NotRequired[bool | None]
    allowed_callers: NotRequired[list[Literal["direct"]] | None]


@with_config(_STRICT)
class FunctionTool(_Tool):
    """A tool that takes an object. `output_schema` means nothing to templates."""

    type: Literal["function"]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]
    output_schema: NotRequired[Any]


@with_config(_STRICT)
class AnyInput(TypedDict):
    """Any text may be the input of a custom tool."""

    type: Literal["text"]


@with_config(_STRICT)
class GrammarInput(TypedDict):
    """What the input of a custom tool must fit. The model is told, and nothing keeps it to that."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


@with_config(_STRICT)
class CustomTool(_Tool):
    """A tool that takes a text."""

    type: Literal["custom"]
    format: NotRequired[Annotated[AnyInput | GrammarInput, Field(discriminator="type")] | None]


_ClientTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


@with_config(_STRICT)
class NamespaceTool(TypedDict):
    """Tools with a common name before theirs."""

    type: Literal["namespace"]
    name: Name
    description: NotRequired[str | None]
    tools: Annotated[list[_ClientTool], Field(fail_fast=True), at_most(MOST_TOOLS)]


@with_config(ConfigDict(strict=True, extra="allow"))
class HostedTool(TypedDict):
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


@with_config(_STRICT)
class NamedTool(TypedDict):
    """The one tool that the model must call."""

    type: Literal["function", "custom"]
    name: Name


class Reasoning(BaseModel):
    """How much the model thinks. The answer has the thoughts, and not a summary, and the template
    gets those of all turns."""

    model_config = _STRICT

    effort: Effort | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Format(BaseModel):
    """What the text must fit."""

    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(BaseModel):
    """The form of the text."""

    model_config = _STRICT

    format: Format | None = None
    # It means nothing here: see `known_fields`.
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(BaseModel):
    """A body of /v1/responses."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    input: Annotated[
        str | Annotated[list[Item], Field(min_length=1, fail_fast=True)], at_most(MOST_MESSAGES)
    ]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: MostTokens | None = None
    tools: Annotated[list[ResponsesTool] | None, at_most(MOST_TOOLS)] = None
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
    def includes_logprobs(self) -> bool:
        """Whether the answer has the log probabilities of its texts' tokens."""
        return LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[Any]:
        """The input as items; some may be references."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input)
