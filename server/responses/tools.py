"""Tools of Responses as functions, which are all that chat templates know, and back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from paged_kv.server.completions.chat_messages import offered_tool
from paged_kv.server.completions.interface import Object
from paged_kv.server.http.api_errors import shortened, wrong_value

log = logging.getLogger(__name__)

# Every form of calls can write names with it.
_SEPARATOR = "__"
# The only parameter of a custom tool, whose input is a text.
_INPUT = "input"


@dataclass(frozen=True)
class OfferedTool:
    """A tool that a request offers.

    Attributes:
        name: as the request has it.
        namespace: that it is in; None for most.
        is_custom: whether its input is a text, rather than an object.
        function: what the model sees, in the form of chat completions.
    """

    name: str
    namespace: str | None
    is_custom: bool
    function: Object

    def empty_call(self, call_id: str) -> Object:
        """The item of a call of which nothing is written yet."""
        item = {"call_id": call_id, "name": self.name}
        if self.namespace is not None:
            item["namespace"] = self.namespace
        if self.is_custom:
            return {"type": "custom_tool_call", **item, "input": ""}
        return {"type": "function_call", **item, "arguments": ""}


def offered_tools(tools: Iterable[Any]) -> dict[str, OfferedTool]:
    """The tools of a checked body by the names of their functions, without those of other types.

    Raises:
        APIError: 400, two tools would be functions of one name.
    """
    offered: dict[str, OfferedTool] = {}
    for tool in _offered(tools):
        name = tool.function["name"]
        other = offered.setdefault(name, tool)
        if other.empty_call("") != tool.empty_call(""):
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
    is_custom = tool["type"] == "custom"
    named = {**tool, "name": function_name(tool)}
    if is_custom:
        named["parameters"] = _text_parameters(tool.get("format") or {})
    function = offered_tool(named)["function"]
    return OfferedTool(tool["name"], tool.get("namespace"), is_custom, function)


def _text_parameters(form: Object) -> Object:
    about = "The whole input of the tool."
    if form.get("type") == "grammar":
        about += f" It must fit this {form['syntax']} grammar:\n{form['definition']}"
    properties = {_INPUT: {"type": "string", "description": about}}
    return {"type": "object", "properties": properties, "required": [_INPUT]}


@cache
def _warn_unsupported(kind: str) -> None:
    log.warning(
        "requests have tools of type %s, which are left out: models are offered functions, custom "
        "tools and those of namespaces",
        kind,
    )
