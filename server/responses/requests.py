"""The bodies of OpenAI's Responses, and their tools as functions, which are all that chat templates
know."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Self

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
    with_config,
)

from paged_kv.server.completions.chat_messages import offered_tool
from paged_kv.server.completions.interface import Object
from paged_kv.server.http.api_errors import shortened, wrong_value
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

log = logging.getLogger(__name__)

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
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str | Annotated[list[_Shown], Field(fail_fast=True)], at_most(MOST_PARTS)]
    name: NotRequired[str | None]
    caller: NotRequired[Any]


class ReasoningText(StrictDict):
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
    format: Format | None = None
    # It means nothing here: see `FOREIGN`.
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(OpenAIFields, ChatFields):
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


# Every form of calls can write names with it.
_SEPARATOR = "__"
# The only parameter of a custom tool, whose input is a text.
_INPUT = "input"


class OfferedTool(NamedTuple):
    """A tool that a request offers: the function that the model sees, in the form of chat
    completions, and the item of a call of which nothing is written yet."""

    function: Object
    empty_call: Object


def offered_tools(tools: Iterable[Any]) -> dict[str, OfferedTool]:
    """The tools of a checked body by the names of their functions, without those of other types.
    Raises APIError 400: two tools would be functions of one name."""
    offered: dict[str, OfferedTool] = {}
    for tool in _offered(tools):
        name = tool.function["name"]
        other = offered.setdefault(name, tool)
        if other.empty_call != tool.empty_call:
            raise wrong_value(
                f"tools: two of them become functions of the name {shortened(name)}, in which a "
                f"namespace ends with {_SEPARATOR!r}: rename one",
                "tools",
            )
        offered[name] = tool
    return offered


def function_name(tool: Any) -> str:
    """The name of the function that a tool is, or that a call is of."""
    namespace = tool.get("namespace")
    return f"{namespace}{_SEPARATOR}{tool['name']}" if namespace else str(tool["name"])


def arguments_of(call: Any) -> str:
    """The arguments of a call in JSON."""
    if call["type"] == "function_call":
        return str(call["arguments"])
    return json.dumps({_INPUT: call["input"]}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input of a custom tool's call: of what is no object with this input, all of it."""
    try:
        given = json.loads(arguments)[_INPUT]
    except (ValueError, TypeError, LookupError, RecursionError):
        return arguments
    return given if isinstance(given, str) else arguments


def _offered(tools: Iterable[Any]) -> Iterator[OfferedTool]:
    for tool in tools:
        match tool["type"]:
            case "function" | "custom":
                yield _offered_tool(tool)
            case "namespace":
                # Said once, before the first tool: it may be long.
                about = f"{tool['description']}\n\n" if tool.get("description") else ""
                for number, each in enumerate(tool["tools"]):
                    described = ("" if number else about) + (each.get("description") or "")
                    inner = {**each, "namespace": tool["name"], "description": described}
                    yield _offered_tool(inner)
            case kind:
                _warn_unsupported(kind)


def _offered_tool(tool: Object) -> OfferedTool:
    named = {**tool, "name": function_name(tool)}
    call: Object = {"type": "function_call", "name": tool["name"], "arguments": ""}
    if tool["type"] == "custom":
        call = {"type": "custom_tool_call", "name": tool["name"], "input": ""}
        about, form = "The whole input of the tool.", tool.get("format") or {}
        if form.get("type") == "grammar":
            about += f" It must fit this {form['syntax']} grammar:\n{form['definition']}"
        properties = {_INPUT: {"type": "string", "description": about}}
        named["parameters"] = {"type": "object", "properties": properties, "required": [_INPUT]}
    if tool.get("namespace") is not None:
        call["namespace"] = tool["namespace"]
    return OfferedTool(offered_tool(named)["function"], call)


@cache
def _warn_unsupported(kind: str) -> None:
    log.warning(
        "requests have tools of type %s, which are left out: models are offered functions, custom "
        "tools and those of namespaces",
        kind,
    )
