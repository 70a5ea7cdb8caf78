"""Coding agents, as they really ask: their first requests and three turns, with templates that take
instructions anywhere and with those that do not."""

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from paged_kv.allocator.prefixes.prefix_index import common_prefix
from tests.server.messages.test_messages import anthropic_client
from tests.support.agent_model import STRICT_TEMPLATE, TEMPLATE, Script, agent_folder
from tests.support.running_server import PagedRunningServer, paged_server

# What a model is shown: who says what.
Shown = list[tuple[str, str]]
# Takes an interface, a body, what the model answers, what it must be shown and the names of its
# tools; gives what the client makes of the answer.
Ask = Callable[[str, dict[str, Any], str, Shown, list[str]], Any]
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
THOUGHT = "<think>\nI look.\n</think>\n\n"
RESULT = ("user", "<tool_response>\nDone.\n</tool_response>")


def schema(name: str) -> Any:
    properties = {name: {"type": "string", "description": "It."}}
    return {"type": "object", "properties": properties, "required": [name]}


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def instruct(shown: Shown, text: str, is_strict: bool) -> None:
    """Add an instruction, as each kind of template shows it."""
    if not is_strict or not shown:
        shown.append(("system", text))
        return
    role, before = shown.pop()
    marked = text if role == "system" else f"<system>\n{text}\n</system>"
    shown.append((role, f"{before}\n\n{marked}"))


def claude_code(ask: Ask, is_strict: bool) -> None:
    fields = {"Bash": "command", "Read": "file_path"}
    tools = [{"name": name, "input_schema": schema(field)} for name, field in fields.items()]
    user = {"metadata": {"user_id": '{"device_id":"a","account_uuid":"","session_id":"b"}'}}
    quota = [{"role": "user", "content": "quota"}]
    ask("messages", {"max_tokens": 1, "messages": quota, **user}, "A.", [("user", "quota")], [])
    texts = ["<system-reminder>\nIt is today.\n</system-reminder>\n", "Mend a.py."]
    blocks = [{"type": "text", "text": text, **EPHEMERAL} for text in texts]
    later = "There are no skills."
    messages: list[Any] = [
        {"role": "user", "content": blocks},
        {"role": "system", "content": later},
    ]
    system = [
        {"type": "text", "text": text, **EPHEMERAL} for text in ("You are Claude Code.", "\n-")
    ]
    shown = [("system", "You are Claude Code.\n-"), ("user", "".join(texts))]
    instruct(shown, later, is_strict)
    said = [call("Read", file_path="a.py"), call("Bash", command="ls"), "Mended."]
    for turn, written in enumerate(said):
        billing = f"x-anthropic-billing-header: cc_entrypoint=cli; cch={turn:05x};"
        body = {
            "system": [{"type": "text", "text": billing}, *system], "tools": tools, **user,
            "messages": messages, "max_tokens": 32_000, "thread": {"type": "create"},
            "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }  # fmt: skip
        message = ask("messages", body, THOUGHT + written, shown, [*fields])
        shown += [("assistant", THOUGHT + written), RESULT]
        content = [block.model_dump() for block in message.content]
        got = {"type": "tool_result", "tool_use_id": content[-1].get("id"), "content": "Done."}
        messages += [{"role": "assistant", "content": content}]
        messages += [{"role": "user", "content": [{**got, "is_error": None, **EPHEMERAL}]}]


def codex(ask: Ask, is_strict: bool) -> None:
    shell = {"type": "function", "name": "shell", "strict": False, "parameters": schema("cmd")}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"}
    patch = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar}
    find = {"type": "function", "name": "find", "strict": False, "parameters": schema("q")}
    docs = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [find]}
    search = {"type": "web_search", "external_web_access": False}
    said = [("developer", "Sandboxed."), ("developer", "Be brief."), ("user", "Mend a.py.")]
    items: list[Any] = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in said
    ]
    shown: Shown = []
    for text in ("You are Codex.", "Sandboxed.", "Be brief."):
        instruct(shown, text, is_strict)
    shown.append(said[-1])
    edit, names = "*** Begin Patch\n\u00e9", ["shell", "apply_patch", "mcp__docs__find"]
    turns: list[tuple[str, dict[str, str]]] = [
        (call("shell", cmd="ls"), {"name": "shell", "arguments": '{"cmd": "ls"}'}),
        (call("apply_patch", input=edit), {"name": "apply_patch", "input": edit}),
        (call("mcp__docs__find", q="a"), {"name": "find", "namespace": "mcp__docs"}),
    ]
    for written, expected in [*turns, ("Mended.", {})]:
        body = {
            "instructions": "You are Codex.", "input": items, "store": False, "tool_choice": "auto",
            "tools": [shell, patch, search, docs], "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"}, "prompt_cache_key": "a",
            "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "a"}, "service_tier": None,
        }  # fmt: skip
        response = ask("responses", body, THOUGHT + written, shown, names)
        shown += [("assistant", THOUGHT + written), RESULT]
        reasoning, last = (each.model_dump() for each in response.output)
        assert {name: last.get(name) for name in expected} == expected
        items += [reasoning | {"content": None, "id": None}, {**last, "id": None}]
        kind, name = f"{last['type']}_output", last.get("call_id")
        items.append({"type": kind, "call_id": name, "output": "Done."})


def opencode(ask: Ask, is_strict: bool) -> None:
    title = [("system", "You are a title generator."), ("user", "Mend a.py.")]
    messages: list[Any] = [{"role": role, "content": text} for role, text in title]
    ask("chat", {"max_tokens": 32_000, "messages": messages}, "A.", title, [])
    function = {"name": "bash", "description": "Runs.", "parameters": schema("command")}
    messages[0] = {"role": "system", "content": "You are opencode."}
    shown = [("system", "You are opencode."), title[1]]
    look = "I look.\n" + call("bash", command="ls")
    for written in [look, call("bash", command="pwd"), "Mended."]:
        body = {
            "messages": messages, "tools": [{"type": "function", "function": function}],
            "tool_choice": "auto", "max_tokens": 32_000, "reasoning_effort": "medium",
        }  # fmt: skip
        message = ask("chat", body, written, shown, ["bash"])
        shown += [("assistant", written.replace(".\n<", ".\n\n<")), RESULT]
        name = message.get("tool_calls", [{}])[0].get("id")
        messages += [message, {"role": "tool", "tool_call_id": name, "content": "Done."}]


@pytest.fixture(scope="module", params=[TEMPLATE, STRICT_TEMPLATE], ids=["permissive", "strict"])
def running(request: Any, script: Script, tmp_path_factory: Any) -> Iterator[PagedRunningServer]:
    folder = agent_folder(tmp_path_factory.mktemp("models"), request.param)
    with paged_server("--model", folder, "--max-kv-bytes", "64MB") as started:
        yield started


def answered(running: PagedRunningServer, interface: str, body: Any) -> tuple[Any, int]:
    """What a client makes of a stream, and how many tokens of its prompt were cached."""
    asked: Any = {"model": "default_model", "extra_body": body}
    if interface == "messages":
        with anthropic_client(running) as client:
            with client.messages.stream(messages=[], max_tokens=1, **asked) as stream:
                message = stream.get_final_message()
            return message, message.usage.cache_read_input_tokens or 0
    with running.client() as openai:
        if interface == "responses":
            *events, last = openai.responses.create(input=[], stream=True, **asked)
            done = [each.item for each in events if each.type == "response.output_item.done"]
            assert done == last.response.output
            return last.response, last.response.usage.input_tokens_details.cached_tokens
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage = openai.chat.completions.create(messages=[], **options, **asked)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    text = "".join(each.content or "" for each in deltas)
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    if calls := [each for delta in deltas for each in delta.tool_calls or ()]:
        arguments = "".join(each.function.arguments for each in calls)
        function = {"name": calls[0].function.name, "arguments": arguments}
        answer["tool_calls"] = [{"id": calls[0].id, "type": "function", "function": function}]
    return answer, usage.usage.prompt_tokens_details.cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize("agent", [claude_code, codex, opencode])
def test_agents_find_all_that_they_sent_before(
    agent: Any, running: PagedRunningServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    thread, tokenizer = running.service.thread, cast("Any", running.provider.tokenizer)
    submit, known = thread.submit, list[int]()

    def noted(jobs: Any) -> None:
        prompts.extend(job.prompt.tokens for job in jobs)
        submit(jobs)

    def ask(interface: str, body: Any, written: str, shown: Shown, names: list[str]) -> Any:
        script.says(written)
        answer, cached = answered(running, interface, body)
        text = tokenizer.decode(prompts[-1]).removesuffix("<effort>medium")
        tools, text = text.split("<|im_end|>\n", 1) if names else ("", text)
        functions = [json.loads(tool)["function"] for tool in tools.splitlines()[2:]]
        assert [function["name"] for function in functions] == names
        expected = [f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in shown]
        assert text == "".join(expected) + "<|im_start|>assistant\n"
        assert cached >= common_prefix(prompts[-1], known) - 1
        known[:] = prompts[-1] + tokenizer.encode(written, add_special_tokens=False)
        return answer

    monkeypatch.setattr(thread, "submit", noted)
    agent(ask, "must be the first" in tokenizer.chat_template)
