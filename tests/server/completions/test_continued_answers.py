"""A chat that ends with the assistant's message continues it, in every interface."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agent_model import Script, agent_folder
from tests.support.running_server import PagedRunningServer, paged_server
from tests.support.tiny_model import asked

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "What?"}
LAST = {"role": "assistant", "content": "It is"}
OPEN = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nIt is"
CLOSED = f"{OPEN}<|im_end|>\n"
CALL = {"type": "function", "id": "a", "function": {"name": "f", "arguments": {}}}


@pytest.fixture(scope="module")
def running(script: Script, tmp_path_factory: Any) -> Iterator[PagedRunningServer]:
    model = agent_folder(tmp_path_factory.mktemp("models"))
    with paged_server("--model", model, "--max-kv-bytes", "64MB") as started:
        yield started


def text_of(path: str, said: Any) -> str:
    if path == CHAT:
        return str(said["choices"][0]["message"]["content"])
    content = said["content"] if path == MESSAGES else said["output"][0]["content"]
    return str(content[0]["text"])


def body_of(path: str, *messages: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": list(messages)}
    return {"messages": list(messages), "max_tokens": 64}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("more", "prompt"),
    [
        ({}, OPEN),
        ({"continue_final_message": True}, OPEN),
        ({"continue_final_message": True, "add_generation_prompt": False}, OPEN),
        ({"add_generation_prompt": False}, OPEN),
        ({"continue_final_message": False}, f"{CLOSED}<|im_start|>assistant\n"),
        ({"add_generation_prompt": True}, f"{CLOSED}<|im_start|>assistant\n"),
        ({"continue_final_message": False, "add_generation_prompt": False}, CLOSED),
    ],
)
def test_the_prompt_ends_within_the_last_message(
    path: str,
    more: dict[str, Any],
    prompt: str,
    running: PagedRunningServer,
    script: Script,
    prompts: list[str],
) -> None:
    script.says(" a file.")
    parts = [{"type": "text", "text": "It"}, {"type": "text", "text": " is"}]
    last = LAST | {"content": parts} if not more and path != RESPONSES else LAST
    status, said = asked(running, path, body_of(path, USER, last) | more)
    assert status == 200, said
    assert prompts == [prompt]
    assert text_of(path, said) == " a file."


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, LAST | {"content": ""}],
        [USER, {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}],
    ],
)
def test_what_cannot_be_continued_is_not(
    messages: list[Any], running: PagedRunningServer, script: Script, prompts: list[str]
) -> None:
    script.says(".")
    assert asked(running, CHAT, body_of(CHAT, *messages))[0] == 200
    assert prompts[0].endswith("<|im_end|>\n<|im_start|>assistant\n")
    status, said = asked(running, CHAT, body_of(CHAT, *messages) | {"continue_final_message": True})
    assert (status, said["error"]["param"]) == (400, "continue_final_message")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    status, said = asked(running, CHAT, body_of(CHAT, USER, LAST) | both)
    assert (status, said["error"]["param"]) == (400, "continue_final_message")
