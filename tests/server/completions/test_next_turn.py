"""The next turn of a chat finds all that comes before its message, as the template writes it."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from paged_kv.server.completions.answer_bodies import ChatAnswers
from paged_kv.server.completions.interface import Choice
from paged_kv.server.engine import next_turns
from paged_kv.server.http.schema import ChatBody
from tests.support.agent_model import TEMPLATE, Script, agent_folder
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    in_float32,
    paged_server,
    wait_until,
)
from tests.support.server_process import metrics
from tests.support.tiny_model import asked, tiny_folder

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# Drops thoughts, and writes calls in another form than the model.
CHANGING = TEMPLATE.replace("message.reasoning_content %}", "false %}").replace(
    '\\"name\\": ', '\\"call\\": '
)
NEW = "And now?"
THOUGHTS = "<think>\nThis is what I think of it, at some length.\n</think>\n\n"
CALLS = "".join(
    f'\n<tool_call>\n{{"name": "read", "arguments": {{"path": "{path}"}}}}\n</tool_call>'
    for path in ("a", "b")
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
NAMED = {"name": "read", "description": "Reads."}
TOOLS = {
    CHAT: {"type": "function", "function": {**NAMED, "parameters": SCHEMA}},
    MESSAGES: {**NAMED, "input_schema": SCHEMA},
    RESPONSES: {"type": "function", **NAMED, "parameters": SCHEMA},
}


@pytest.fixture(scope="module")
def running(script: Script, tmp_path_factory: Any) -> Iterator[PagedRunningServer]:
    folder = agent_folder(tmp_path_factory.mktemp("models"), CHANGING)
    with paged_server("--model", folder, "--max-kv-bytes", "64MB") as started:
        yield started


def turn(running: PagedRunningServer, path: str, items: list[Any]) -> tuple[list[Any], int]:
    """What a client sends back of an answer, and how many tokens of its prompt were computed."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    name = "input" if path == RESPONSES else "messages"
    body = {name: items, "tools": [TOOLS[path]], limit: 200, "model": "default_model"}
    status, answer = asked(running, path, body)
    assert status == 200, answer
    running.wait_until_idle()
    usage = answer["usage"]
    if path == MESSAGES:
        return [{"role": "assistant", "content": answer["content"]}], usage["input_tokens"]
    if path == RESPONSES:
        found = usage["input_tokens_details"]["cached_tokens"]
        return answer["output"], usage["input_tokens"] - found
    found = usage["prompt_tokens_details"]["cached_tokens"]
    message = answer["choices"][0]["message"]
    message.pop("reasoning", None)  # as most clients do
    return [message], usage["prompt_tokens"] - found


def results(path: str, answer: list[Any]) -> list[Any]:
    """A result of each call."""
    if path == RESPONSES:
        ids = [each["call_id"] for each in answer if "call_id" in each]
        return [{"type": "function_call_output", "call_id": each, "output": NEW} for each in ids]
    if path == CHAT:
        ids = [each["id"] for each in answer[0]["tool_calls"]]
        return [{"role": "tool", "tool_call_id": each, "content": NEW} for each in ids]
    ids = [each["id"] for each in answer[0]["content"] if "input" in each]
    blocks = [{"type": "tool_result", "tool_use_id": each, "content": NEW} for each in ids]
    return [{"role": "user", "content": blocks}]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_turn_computes_only_its_message(
    path: str, running: PagedRunningServer, script: Script
) -> None:
    def length(text: str) -> int:
        tokenizer: Any = running.provider.tokenizer
        return len(tokenizer.encode(text, add_special_tokens=False))

    items: list[Any] = [{"role": "user", "content": f"A question at {path}."}]
    script.says(f"{THOUGHTS}Here is the answer to it.", f"{THOUGHTS}I look.{CALLS}", "Seen.")
    answer, _ = turn(running, path, items)
    items += [*answer, {"role": "user", "content": NEW}]
    answer, computed = turn(running, path, items)
    assert computed == length(f"{NEW}<|im_end|>\n<|im_start|>assistant\n")
    items += answer + results(path, answer)
    _, computed = turn(running, path, items)
    result = f"{NEW}\n</tool_response><|im_end|>\n<|im_start|>"
    assert computed == length(f"{result}user\n<tool_response>\n{result}assistant\n")


# Writes answers otherwise than the model.
REWRITING = (
    "{% for each in messages %}<{{ each.role }}>"
    "{{ each.content | upper if each.role == 'assistant' else each.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.slow
def test_answers_are_the_same_with_it_and_without(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "qwen3_next")
    told: dict[str, tuple[list[str], int]] = {}
    for choice in ("on", "off"):
        options = ["--model", folder, "--prepare-next", choice, "--chat-template", REWRITING]
        with in_float32(), paged_server(*options) as running, running.client() as client:
            messages: list[Any] = []
            for question in ("Who are you?", "And who am I?", "Why?"):
                messages.append({"role": "user", "content": question})
                stream: Any = client.chat.completions.create(
                    model="default_model",
                    messages=messages,
                    max_tokens=24,
                    stream=True,
                    logit_bias={"0": -1000},
                )
                text = "".join(each.choices[0].delta.content or "" for each in stream)
                messages.append({"role": "assistant", "content": text})
                running.wait_until_idle()
            metrics = running.service.metrics
            told[choice] = [each["content"] for each in messages], metrics.prepared_found
    assert told["on"][0] == told["off"][0]
    assert told["on"][1] > 24 > 0 == told["off"][1]


def test_a_request_that_comes_meanwhile_finds_what_is_computed(
    running: PagedRunningServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, before = running.service.thread, metrics(running.port)
    step, calls, is_amid = thread.next_turns.step, count(), Event()

    def waiting(*arguments: Any) -> None:
        if next(calls) == 3:  # it has read the turn, and computed two pieces
            is_amid.set()
            wait_until(lambda: not thread._commands.empty())
        step(*arguments)

    monkeypatch.setattr(next_turns, "PIECE_TOKENS", 16)
    monkeypatch.setattr(thread.next_turns, "step", waiting)
    script.says(f"{THOUGHTS}{'One more word. ' * 15}", "Well.")
    messages: list[Any] = [{"role": "user", "content": "Tell me all."}]
    for _ in range(2):
        body = {"messages": messages, "max_tokens": 200, "model": "default_model"}
        status, answer = asked(running, CHAT, body)
        assert status == 200, answer
        messages += [answer["choices"][0]["message"], {"role": "user", "content": NEW}]
        messages[-2].pop("reasoning", None)
        assert is_amid.wait(PATIENCE_S)
    running.wait_until_idle()
    after = metrics(running.port)
    found = "prepared_tokens_found_total"
    assert after[found] - before[found] == 3 * 16  # it waits for the third piece


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", ""])
def test_thoughts_come_back_from_clients_that_have_sent_some(field: str) -> None:
    messages: list[Any] = [{"role": "assistant", "content": "Yes.", field: "So."}]
    answers = ChatAnswers(ChatBody.model_construct(messages=messages), "a", None)
    answer = answers.sent_back(Choice(0, "No.", "Or so?"))
    assert (answer.text, bool(answer.reasoning)) == ("No.", bool(field))
