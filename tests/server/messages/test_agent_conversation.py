"""A coding agent's conversation: nearly all of its prompts' tokens come from the cache."""

import argparse
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.messages.test_messages import anthropic_client
from tests.support.agent_model import Script, agent_folder
from tests.support.running_server import PagedRunningServer, paged_server

TURNS = 30
# Such agents begin with 10,000 to 20,000 tokens of instructions and tools.
SYSTEM = inspect.getsource(argparse)[:32_000]
TOOLS: list[Any] = [
    {
        "name": name,
        "description": f"Use it to {name} what the user names. " * 20,
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    for name in ("read", "write", "edit", "grep", "run")
]


@pytest.fixture(scope="module")
def running(script: Script, tmp_path_factory: Any) -> Iterator[PagedRunningServer]:
    folder = agent_folder(tmp_path_factory.mktemp("models"))
    with paged_server("--model", folder, "--max-kv-bytes", "256MB") as started:
        yield started


def system(turn: int) -> list[Any]:
    """Instructions after a line that differs in every request, as agents of Anthropic send it."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={turn:05x};"
    marked = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
    return [{"type": "text", "text": billing}, marked]


def result_of(turn: int) -> str:
    """About 300 tokens of a file."""
    source = inspect.getsource(json.decoder if turn % 2 else json.encoder)
    return source[300 * turn :][:900]


@pytest.mark.soak
def test_95_percent_of_an_agents_prompt_tokens_come_from_the_cache(
    running: PagedRunningServer, script: Script
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Mend the encoder."}]
    read = written = 0
    with anthropic_client(running) as client:
        for turn in range(TURNS):
            arguments = json.dumps({"path": f"json/part_{turn}.py"})
            script.says(
                f"<think>\nPart {turn} is next.\n</think>\n\nI read part {turn}.\n<tool_call>\n"
                f'{{"name": "read", "arguments": {arguments}}}\n</tool_call>'
            )
            with client.messages.stream(
                model="default_model",
                max_tokens=256,
                system=system(turn),
                tools=TOOLS,
                messages=messages,
            ) as stream:
                message = stream.get_final_message()
            assert [each.type for each in message.content] == ["thinking", "text", "tool_use"]
            usage = message.usage
            assert usage.input_tokens == 0
            read += usage.cache_read_input_tokens or 0
            written += usage.cache_creation_input_tokens or 0
            call = message.content[-1]
            assert call.type == "tool_use"
            result = {"type": "tool_result", "tool_use_id": call.id, "content": result_of(turn)}
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ]
    assert read / (read + written) >= 0.95
