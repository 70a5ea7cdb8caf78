"""The answers that the anthropic package's client gets have the shapes of Anthropic's API."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from paged_kv.server.completions import handler
from tests.support.agent_model import CONTEXT, Script, agent_folder
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    failing_after_a_step,
    paged_server,
)
from tests.support.tiny_model import asked

NAME = "agent"
PATH = "/v1/messages"
BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cch="
KEPT = {"type": "clear_thinking_20251015", "keep": "all"}
RAW = {
    *("message_start", "message_delta", "message_stop", "content_block_start"),
    *("content_block_delta", "content_block_stop"),
}
ASK: Any = {
    "model": NAME,
    "max_tokens": 256,
    "messages": [{"role": "user", "content": "What is in a.py?"}],
}
READ: Any = {
    "name": "read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
THOUGHT = "<think>\nIt is in a file.\n</think>\n\n"


@pytest.fixture
def client(running: PagedRunningServer) -> Iterator[Anthropic]:
    with anthropic_client(running) as opened:
        yield opened
    assert_idle_pools_hold_nothing(running)


def anthropic_client(running: PagedRunningServer, **options: Any) -> Anthropic:
    defaults = {"max_retries": 0, "timeout": PATIENCE_S, "api_key": "none"}
    url = f"http://127.0.0.1:{running.port}"
    return Anthropic(base_url=url, **{**defaults, **options})


def blocks(message: Any) -> list[dict[str, Any]]:
    return [block.to_dict() for block in message.content]


def test_a_message_has_a_text_and_counts(client: Anthropic, script: Script) -> None:
    script.says("Nothing.")
    message = client.messages.create(**ASK)
    assert blocks(message) == [{"type": "text", "text": "Nothing."}]
    assert (message.role, message.model, message.type) == ("assistant", NAME, "message")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens > 5
    assert message.usage.output_tokens > 1


def test_thoughts_texts_and_calls_are_blocks_in_their_order_whole_and_streamed(
    client: Anthropic, script: Script
) -> None:
    script.says(*[f"{THOUGHT}I read it.\n{CALL}\n{CALL}"] * 2)
    whole = client.messages.create(**ASK, tools=[READ])
    kinds = [block.type for block in whole.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, call, _ = whole.content
    assert thinking.type == "thinking"
    assert "It is in a file." in thinking.thinking
    assert text.type == "text"
    assert text.text.strip() == "I read it."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("read", {"path": "a.py"})
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**ASK, tools=[READ]) as stream:
        kinds = [event.type for event in stream if event.type in RAW]
        final = stream.get_final_message()
    own = [{"id": "", "caller": None, "citations": None, **block} for block in blocks(final)]
    assert [block | {"id": ""} for block in own] == [
        {"caller": None, "citations": None, **block, "id": ""} for block in blocks(whole)
    ]
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    opened = ["content_block_start", "content_block_delta", "content_block_stop"]
    once = [kind for at, kind in enumerate(kinds) if [kind] != kinds[at - 1 : at]]
    assert once == ["message_start", *opened * 4, "message_delta", "message_stop"]


def test_events_have_the_names_and_fields_of_anthropics(
    running: PagedRunningServer, script: Script
) -> None:
    script.says("<think>\nSo.\n</think>Yes")
    events = events_of(running, {**ASK, "stream": True})
    assert [name for name, _ in events] == [event["type"] for _, event in events]
    told = [event for name, event in events]
    start = told[0]["message"]
    assert start["content"] == []
    assert start["usage"]["output_tokens"] == 0
    assert start["usage"]["input_tokens"] > 5
    assert told[1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "thinking", "thinking": "", "signature": ""},
    }
    thought = [event for event in told if event.get("index") == 0][1:-2]
    assert {event["delta"]["type"] for event in thought} == {"thinking_delta"}
    signed, stop = [event for event in told if event.get("index") == 0][-2:]
    assert signed["delta"] == {"type": "signature_delta", "signature": "unsigned"}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert told[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] > 3
    assert told[-1] == {"type": "message_stop"}


def test_a_stream_in_which_nothing_happens_has_pings(
    running: PagedRunningServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "KEEPALIVE_S", 0.01)
    goes_on = Event()

    def hold(_: Any) -> None:
        assert goes_on.wait(PATIENCE_S)

    script.says("Yes. " * 40)
    other = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    other.request("POST", PATH, json.dumps({**ASK, "stream": True}))
    with other.getresponse() as stream:
        stream.readline()
        running.service.thread._commands.put(hold)
        while stream.readline() != b'data: {"type":"ping"}\n':
            pass
        goes_on.set()
        assert stream.read().endswith(b'data: {"type":"message_stop"}\n\n')


def test_a_message_ends_at_a_stop_sequence_or_at_its_limit(
    client: Anthropic, script: Script
) -> None:
    script.says(*["One, two, three."] * 3)
    stops: Any = {**ASK, "stop_sequences": ["four", ", three"]}
    stopped = client.messages.create(**stops)
    assert blocks(stopped) == [{"type": "text", "text": "One, two"}]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ", three")
    with client.messages.stream(**stops) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", ", three")
    short = client.messages.create(**{**ASK, "max_tokens": 2})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)


def test_a_conversation_is_the_prompt_that_chat_completions_make_of_it(
    client: Anthropic, running: PagedRunningServer, script: Script, prompts: list[str]
) -> None:
    """Documents and what a search has found are texts, and null means that there is nothing."""
    script.says("A.", "B.")
    plain = {"type": "text", "media_type": "text/plain", "data": "In a."}
    document = {"type": "document", "source": plain, "title": "A", "context": None}
    parts = {"type": "content", "content": [{"type": "text", "text": "In b."}]}
    found: Any = {"type": "search_result", "source": "file:a", "title": "A", "citations": None}
    found |= {"content": [{"type": "text", "text": "empty"}]}
    nothing = {"caller": None, "toolset_name": None}
    call = {"type": "tool_use", "id": "1", "name": "read", "input": {"path": "a"}, **nothing}
    client.messages.create(
        **{**ASK, "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]},
        tools=[READ],
        extra_body={
            "thread": {"type": "create"},
            "messages": [
                {"role": "user", "content": "Read"},
                {"role": "user", "content": [{"type": "text", "text": " it."}, document]},
                {"role": "user", "content": [{"type": "document", "source": parts}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "So.", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "I read."},
                        call,
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [found]},
                        {"type": "text", "text": "Well?"},
                    ],
                },
            ],
        },
    )
    function: Any = {"name": "read", "description": READ["description"]}
    function |= {"parameters": READ["input_schema"]}
    called = {"name": "read", "arguments": '{"path": "a"}'}
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Read it.A\nIn a.\nIn b.\n"},
        {
            "role": "assistant",
            "content": "I read.",
            "reasoning_content": "So.",
            "tool_calls": [{"type": "function", "id": "1", "function": called}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "A\nfile:a\nempty\n"},
        {"role": "user", "content": "Well?"},
    ]
    with running.client() as openai:
        openai.chat.completions.create(
            model=NAME, tools=[{"type": "function", "function": function}], messages=messages
        )
    mine, theirs = prompts
    for said in ("Be short.", "Read it.", "So.", "I read.", '{"path": "a"}', "empty", "Well?"):
        assert said in mine
    assert mine == theirs


def test_thinking_and_effort_are_variables_of_the_template(
    client: Anthropic, script: Script, prompts: list[str]
) -> None:
    script.says(*["<think>\nSo.\n</think>A."] * 4)
    for thinking in ("disabled", "adaptive"):
        client.messages.create(**ASK, extra_body={"thinking": {"type": thinking}})
    client.messages.create(**ASK, extra_body={"output_config": {"effort": "low"}})
    assert prompts[0].endswith("<think>\n\n</think>\n\n")
    assert prompts[1].endswith("<|im_start|>assistant\n")
    assert prompts[2].endswith("<effort>low")
    omitted = {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}
    message = client.messages.create(**ASK, extra_body={"thinking": omitted})
    assert blocks(message)[0] == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert prompts[3] == prompts[1]


def test_a_text_fits_a_schema(client: Anthropic, script: Script) -> None:
    script.says("<think>So.</think>no")
    form = {"type": "json_schema", "schema": {"const": "yes"}}
    message = client.messages.create(**ASK, extra_body={"output_config": {"format": form}})
    assert blocks(message)[1:] == [{"type": "text", "text": '"yes"'}]
    form["schema"] = {"type": "no"}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        client.messages.create(**ASK, extra_body={"output_config": {"format": form}})


def test_marks_tell_how_many_tokens_are_counted_as_written(
    client: Anthropic, script: Script
) -> None:
    def counted(**more: Any) -> Any:
        script.says("A.")
        system = [{"type": "text", "text": "It is long. " * 100, **more}]
        usage = client.messages.create(**ASK, system=system).usage  # type: ignore[arg-type]
        return (
            usage.input_tokens,
            usage.cache_creation_input_tokens,
            usage.cache_read_input_tokens,
        )

    first = counted(cache_control={"type": "ephemeral", "ttl": "1h"})
    assert first[::2] == (0, 0)
    assert counted(cache_control={"type": "ephemeral"}) == (0, 1, first[1] - 1)
    assert counted() == (1, 0, first[1] - 1)


def test_lines_that_change_with_every_request_do_not_break_the_prefix(
    client: Anthropic, script: Script, prompts: list[str]
) -> None:
    for number, system in enumerate(
        (
            [{"type": "text", "text": f"{BILLING}1;"}, {"type": "text", "text": "It is long."}],
            [{"type": "text", "text": f"{BILLING}2;\nIt is long."}],
            f"{BILLING}3;\nIt is long.",
            "It is long.",
            f"It is long. {BILLING}4;",
        )
    ):
        script.says(f"{number}")
        client.messages.create(**ASK, system=system)  # type: ignore[arg-type]
    assert len(set(prompts[:4])) == 1
    assert BILLING not in prompts[0]
    # In the midst of a block it is text like any other.
    assert BILLING in prompts[4]


def test_tokens_are_counted_without_generating(
    client: Anthropic, running: PagedRunningServer, script: Script
) -> None:
    generated = running.service.metrics.generation_tokens
    prompt: Any = {"model": NAME, "messages": ASK["messages"], "system": "Be short."}
    count = client.messages.count_tokens(**prompt, tools=[READ]).input_tokens
    assert running.service.metrics.generation_tokens == generated
    script.says("A.")
    usage = client.messages.create(**prompt, tools=[READ], max_tokens=8).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count


@pytest.mark.slow
def test_both_packages_list_models_with_their_context_and_abilities(
    tmp_path: Path, script: Script
) -> None:
    first, other = (agent_folder(tmp_path / name) for name in ("first", "other"))
    options = ["--model", first, "--model-alias", f"claude={other}", f"same={first}"]
    with (
        paged_server(*options) as running,
        anthropic_client(running) as client,
        running.client() as openai,
    ):

        def contexts() -> dict[str, Any]:
            return {model.id: model.max_input_tokens for model in client.models.list()}

        assert contexts() == {"agent": CONTEXT, "same": CONTEXT, "claude": None}
        model: Any = openai.models.retrieve("same")
        assert model.context_length == CONTEXT
        assert model.abilities == {"images": False, "thinking": True, "tools": True}
        script.says("A.")
        assert client.messages.create(**{**ASK, "model": "claude"}).model == "claude"
        assert contexts() == {"agent": None, "same": None, "claude": CONTEXT}
        assert running.provider.loaded
        assert running.provider.loaded.key[0] == other
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ASK, "model": other})


def test_errors_have_anthropics_form(client: Anthropic, running: PagedRunningServer) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as wrong:
        client.messages.create(**{**ASK, "max_tokens": 0})
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.error_code == "invalid_value"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**{**ASK, "model": "gpt-4"})
    assert unknown.value.type == "not_found_error"
    body: Any = unknown.value.body
    assert body["request_id"] == unknown.value.response.headers["X-Request-Id"]
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences: ") as long:
        client.messages.create(**ASK, stop_sequences=["x" * 5000])
    body = long.value.body
    assert body["error"]["details"]["param"] == "stop_sequences"
    too_long = rf"'prompt is too long: \d+ tokens > {CONTEXT} maximum"
    with pytest.raises(anthropic.BadRequestError, match=too_long) as much:
        client.messages.create(
            **{**ASK, "messages": [{"role": "user", "content": "a b " * CONTEXT}]}
        )
    assert much.value.error_code == "context_length_exceeded"
    status, body = asked(running, f"{PATH}/batches", ASK)
    assert (status, body["error"]["type"]) == (404, "not_found_error")


def test_an_error_in_a_stream_is_an_event(running: PagedRunningServer, script: Script) -> None:
    script.says("A.")
    with failing_after_a_step():
        name, event = events_of(running, {**ASK, "stream": True})[-1]
    assert (name, event["error"]["type"]) == ("error", "api_error")


@pytest.mark.slow
def test_keys_come_in_either_header(script: Script, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice-key\n")
    with paged_server("--model", agent_folder(tmp_path), "--api-key", str(keys)) as running:
        ask = {**ASK, "model": "default_model"}
        for headers in ({"x-api-key": "alice-key"}, {"Authorization": "Bearer alice-key"}):
            script.says("A.")
            assert asked(running, PATH, ask, **headers)[0] == 200
        with anthropic_client(running, api_key="bob-key") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                client.messages.create(**ask)
            assert refused.value.type == "authentication_error"
        assert asked(running, PATH, ask, **{"x-api-key": "bob-key"})[0] == 401


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"metadata": {"user_id": "a"}, "service_tier": "auto", "speed": "fast"}, 200),
        ({"context_management": {"edits": [KEPT]}, "mcp_servers": []}, 200),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "container": None}, 200),
        ({"tool_choice": {"type": "auto"}, "tools": [READ]}, 200),
        ({"tool_choice": {"type": "any"}, "tools": [READ]}, 200),
        ({"tool_choice": {"type": "tool", "name": "read"}, "tools": [READ]}, 200),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, 200),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 400),
        ({"container": "c"}, 400),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400),
        ({"tools": [{**READ, "defer_loading": True}]}, 400),
        ({"tool_choice": {"type": "tool"}, "tools": [READ]}, 400),
        ({"n": 2}, 400),
    ],
)
@pytest.mark.slow
def test_fields_that_change_the_meaning_work_or_are_refused(
    more: dict[str, Any], status: int, running: PagedRunningServer, script: Script
) -> None:
    if status == 200:
        script.says("A.")
    got, body = asked(running, PATH, {**ASK, **more})
    assert got == status, body
    if status == 400:
        assert body["error"]["details"]["param"].partition(".")[0] in more


def events_of(running: PagedRunningServer, body: Any) -> list[tuple[str, Any]]:
    """The names and the objects of a stream's events."""
    client = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    client.request("POST", PATH, json.dumps(body))
    events = client.getresponse().read().decode().split("\n\n")
    found = []
    for event in events:
        lines = [line for line in event.split("\n") if not line.startswith(":") and line]
        if lines:
            name, data = lines
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


HOUR = {"type": "ephemeral", "ttl": "1h"}
MINUTES = {"type": "ephemeral"}


def marked(text: str, mark: Any) -> Any:
    return [{"type": "text", "text": text, "cache_control": mark}]


@pytest.mark.parametrize("where", ["system", "first message", "last message", "body"])
@pytest.mark.slow
def test_what_a_mark_of_an_hour_ends_is_counted_and_held_for_an_hour(
    client: Anthropic, running: PagedRunningServer, where: str
) -> None:
    """And the rest of the prompt for 5 minutes."""
    mark = {at: HOUR if at == where else MINUTES for at in ("system", "first message")}
    ask: Any = {
        "model": NAME,
        "max_tokens": 4,
        "system": marked(f"{where}: " + "Be short. " * 200, mark["system"]),
        "messages": [
            {"role": "user", "content": marked("Well? " * 200, mark["first message"])},
            {"role": "assistant", "content": "Well."},
            {
                "role": "user",
                "content": marked("Go on. " * 200, HOUR if where == "last message" else MINUTES),
            },
        ],
    }
    if where == "body":
        ask["extra_body"] = {"cache_control": HOUR}
    assert_idle_pools_hold_nothing(running)
    until = running.service.thread._now + 3000
    first = client.messages.create(**ask).usage
    assert first.cache_creation is not None
    hour = first.cache_creation.ephemeral_1h_input_tokens
    minutes = first.cache_creation.ephemeral_5m_input_tokens
    whole = first.cache_creation_input_tokens
    assert (hour + minutes, first.input_tokens) == (whole, 0)
    assert whole is not None
    near = {"system": 0.33, "first message": 0.67, "last message": 1.0, "body": 1.0}
    assert hour / whole == pytest.approx(near[where], abs=0.1)
    again = client.messages.create(**ask).usage
    assert again.cache_read_input_tokens
    assert again.cache_creation is not None
    assert again.cache_creation.ephemeral_1h_input_tokens <= 1
    running.wait_until_idle()
    (pool,) = running.pools
    pool.clear()
    in_all = pool.stats().pages_pinned
    assert in_all >= whole // 256
    pool.index.holds.expire(until)
    assert hour // 256 <= pool.stats().pages_pinned <= hour // 256 + 1
    pool.clear()
    kept = client.messages.create(**ask).usage.cache_read_input_tokens
    assert kept is not None
    assert hour - 2 <= kept <= hour + 256
