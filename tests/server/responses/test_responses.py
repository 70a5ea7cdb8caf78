"""What the openai package's client gets of Responses has the shapes of OpenAI's API."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.agent_model import CONTEXT, Script
from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    failing_after_a_step,
)
from tests.support.tiny_model import asked

NAME = "agent"
PATH = "/v1/responses"
ASK: Any = {"model": NAME, "input": "What is in a.py?"}
READ: Any = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}
ARGUMENTS = '{"path": "a.py"}'
CALL = f'<tool_call>\n{{"name": "read", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>\nIt is in a file.\n</think>\n\n"


@pytest.fixture
def client(running: PagedRunningServer) -> Iterator[OpenAI]:
    with running.client() as opened:
        yield opened
    assert_idle_pools_hold_nothing(running)


def without_names(value: Any) -> Any:
    """The same without ids, and without what only the client makes."""
    if isinstance(value, dict):
        names = {"id", "call_id", "parsed", "parsed_arguments"}
        return {name: without_names(each) for name, each in value.items() if name not in names}
    return [without_names(each) for each in value] if isinstance(value, list) else value


def test_a_response_has_a_text_and_counts(client: OpenAI, script: Script) -> None:
    script.says("Nothing.")
    response = client.responses.create(**ASK, instructions="Be short.", metadata={"a": "b"})
    assert response.output_text == "Nothing."
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert (response.model, response.instructions, response.metadata) == (
        NAME,
        "Be short.",
        {"a": "b"},
    )
    usage = response.usage
    assert usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens > 5
    assert (
        usage.input_tokens_details.cached_tokens + usage.input_tokens_details.cache_write_tokens
        == usage.input_tokens
    )
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_thoughts_texts_and_calls_are_items_in_their_order_whole_and_streamed(
    client: OpenAI, script: Script
) -> None:
    script.says(*[f"{THOUGHT}I read it.\n{CALL}\n{CALL}"] * 2)
    asked: Any = {**ASK, "tools": [READ], "include": ["reasoning.encrypted_content"]}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    reasoning, message, call, _ = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content
    assert reasoning.content[0].text.strip() == "It is in a file."
    assert reasoning.encrypted_content == "plain:" + reasoning.content[0].text
    assert message.type == "message"
    assert whole.output_text == "I read it."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("read", {"path": "a.py"})
    assert whole.usage
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    streamed = [item.to_dict() for item in final.output]
    assert without_names(streamed) == without_names([item.to_dict() for item in whole.output])
    assert final.usage
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_openais_order_and_are_numbered(client: OpenAI, script: Script) -> None:
    script.says(f"<think>So.</think>Yes{CALL}")
    events: list[Any] = list(client.responses.create(**ASK, tools=[READ], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = [event.type.removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(told) if [kind] != told[at - 1 : at]]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    first, last = events[0], events[-1]
    assert first.type == "response.created"
    assert last.type == "response.completed"
    assert (first.response.status, first.response.output) == ("in_progress", [])
    assert first.response.id == last.response.id
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == last.response.output
    assert [event.output_index for event in done] == [0, 1, 2]
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.item.id for event in added] == [event.item.id for event in done]
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == last.response.output_text == "Yes"
    kind = "response.function_call_arguments.delta"
    written = [each.delta for each in events if each.type == kind]
    assert len(written) > 2, "as the model writes them"
    assert "".join(written) == last.response.output[2].arguments == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_is_incomplete(client: OpenAI, script: Script, stream: bool) -> None:
    script.says("One, two, three.")
    answer: Any = client.responses.create(**ASK, max_output_tokens=2, stream=stream)
    if stream:
        last = list(answer)[-1]
        assert last.type == "response.incomplete"
        answer = last.response
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"


@pytest.mark.slow
def test_a_response_is_continued_from_what_is_kept(
    client: OpenAI, script: Script, prompts: list[str]
) -> None:
    """Its prompt is the same as when the client sends everything, and is cached up to the new."""
    script.says(f"{THOUGHT}I read it.\n{CALL}", "It is empty.", "It is empty.")
    first = client.responses.create(**ASK, tools=[READ], instructions="Be short.")
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "empty"}
    more: Any = {"model": NAME, "tools": [READ], "instructions": "Be short."}
    second = client.responses.create(**more, previous_response_id=first.id, input=[result])
    assert second.previous_response_id == first.id
    assert second.usage
    assert first.usage
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens + first.usage.output_tokens - 2
    question: Any = {"role": "user", "content": ASK["input"]}
    output: Any = [item.to_dict() for item in first.output]
    client.responses.create(**more, input=[question, *output, result], store=False)
    assert prompts[1] == prompts[2]
    for said in ("Be short.", "What is in a.py?", "It is in a file.", "I read it.", "empty"):
        assert prompts[1].count(said) == 1
    # Instructions do not come back of their own accord.
    script.says("Bye.")
    client.responses.create(model=NAME, previous_response_id=second.id, input="Bye")
    assert "Be short." not in prompts[3]
    assert "It is empty." in prompts[3]


def test_kept_responses_are_read_and_deleted(client: OpenAI, script: Script) -> None:
    script.says("A.", "B.")
    response = client.responses.create(**ASK)
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as refused:
        client.responses.create(**ASK, previous_response_id=response.id)
    assert refused.value.param == "previous_response_id"
    unstored = client.responses.create(**ASK, store=False)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_responses_of_another_salt_are_not_found(client: OpenAI, script: Script) -> None:
    script.says("A.", "B.")
    salted: Any = {"extra_body": {"cache_salt": "alice"}}
    response = client.responses.create(**ASK, **salted)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASK, previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    found = client.responses.retrieve(response.id, extra_query={"cache_salt": "alice"})
    assert found == response
    client.responses.create(**ASK, previous_response_id=response.id, **salted)


def test_a_text_fits_a_schema(client: OpenAI, script: Script) -> None:
    script.says("<think>So.</think>no")
    form: Any = {"type": "json_schema", "name": "a", "schema": {"const": "yes"}, "strict": True}
    response = client.responses.create(**ASK, text={"format": form}, max_output_tokens=64)
    assert response.output_text == '"yes"'
    assert response.text
    assert response.text.format
    assert response.text.format.type == "json_schema"
    wrong: Any = {"format": {**form, "schema": {"type": "no"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, text=wrong)
    assert str(refused.value.param).startswith("text.format")


def test_effort_is_a_variable_of_the_template(
    client: OpenAI, script: Script, prompts: list[str]
) -> None:
    script.says("A.", "B.")
    client.responses.create(**ASK, reasoning={"effort": "low", "summary": "auto"})
    client.responses.create(**ASK, reasoning={"effort": "none"})
    assert prompts[0].endswith("<effort>low")
    assert prompts[1].endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"user": "a", "service_tier": "auto", "prompt_cache_key": "a", "conversation": None}, 200),
        ({"truncation": "disabled", "background": False, "include": []}, 200),
        ({"tool_choice": "auto", "tools": [READ], "parallel_tool_calls": True}, 200),
        ({"tool_choice": "required", "tools": [READ]}, 200),
        ({"tool_choice": {"type": "function", "name": "read"}, "tools": [READ]}, 200),
        ({"truncation": "auto"}, 400),
        ({"background": True}, 400),
        ({"conversation": "conv_1"}, 400),
        ({"tools": [{"type": "web_search", "filters": {}}]}, 200),
        ({"tools": [{"type": "web_serch"}]}, 400),
        ({"tools": [READ, {"type": "custom", "name": "read"}]}, 400),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, 400),
        ({"include": ["message.output_text.logprobs"]}, 200),
        ({"include": ["file_search_call.results"]}, 400),
        ({"top_logprobs": 5}, 200),
        ({"top_logprobs": 21}, 400),
        ({"max_tokens": 5}, 400),
        ({"max_output_tokens": 0}, 400),
        ({"input": []}, 400),
        ({"input": [{"type": "item_reference", "id": "a"}]}, 400),
        ({"input": "a b " * CONTEXT}, 400),
        ({"text": {"format": {"type": "json_schema"}}}, 400),
        ({"text": {"verbosity": "low"}}, 200),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
        ),
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
        assert body["error"]["param"].partition(".")[0] in more


def test_an_error_in_a_stream_is_a_failed_response(client: OpenAI, script: Script) -> None:
    script.says("A.")
    with failing_after_a_step():
        last = list(client.responses.create(**ASK, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error
    assert last.response.error.code == "server_error"


@pytest.mark.slow
def test_texts_have_the_log_probabilities_of_their_tokens(client: OpenAI, script: Script) -> None:
    """And thoughts, calls and marks have none."""
    said = f"{THOUGHT}I read it, twice.\n{CALL}"
    script.says(said, said, said)
    asked: Any = {**ASK, "tools": [READ], "include": ["message.output_text.logprobs"]}
    whole: Any = client.responses.create(**asked, top_logprobs=3)
    with client.responses.stream(**asked, top_logprobs=3) as stream:
        events: Any = list(stream)
        streamed: Any = stream.get_final_response()
    for response in (whole, streamed):
        (text,) = [item.content[0] for item in response.output if item.type == "message"]
        tokens = text.logprobs
        assert "".join(each.token for each in tokens).strip() == text.text == "I read it, twice."
        assert all(each.logprob > -1e-3 for each in tokens)
        for each in tokens:
            assert bytes(each.bytes).decode() == each.token
            assert [top.logprob for top in each.top_logprobs] == sorted(
                (top.logprob for top in each.top_logprobs), reverse=True
            )
            assert (len(each.top_logprobs), each.top_logprobs[0].token) == (3, each.token)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    of_deltas = [each.token for event in deltas for each in event.logprobs]
    assert of_deltas == [each.token for each in done.logprobs]
    without: Any = client.responses.create(**ASK, top_logprobs=3)
    (text,) = [item.content[0] for item in without.output if item.type == "message"]
    assert text.logprobs == []


def test_items_are_listed_and_referred_to(
    client: OpenAI, script: Script, prompts: list[str]
) -> None:
    script.says(f"I read it.\n{CALL}", "It is empty.", "Yes.", "Yes.")
    first = client.responses.create(**ASK, tools=[READ])
    outputs: Any = first.output
    text, call = outputs
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "empty"}
    second = client.responses.create(
        model=NAME, tools=[READ], previous_response_id=first.id, input=[result]
    )
    asc: Any = [*client.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in asc] == [
        *("message", "message", "function_call", "function_call_output")
    ]
    assert asc[0].content[0].to_dict() == {"type": "input_text", "text": ASK["input"]}
    assert [item.id for item in asc[1:3]] == [text.id, call.id]
    # In pages, the latest first.
    desc: Any = [*client.responses.input_items.list(second.id, limit=3)]
    assert [item.id for item in desc] == [item.id for item in reversed(asc)]
    page = client.responses.input_items.list(second.id, limit=1, after=str(desc[0].id))
    assert [item.id for item in page.data] == [desc[1].id]
    # The same conversation, by references.
    refer: Any = [{"type": "item_reference", "id": item.id} for item in asc]
    refer += [{"id": second.output[0].id}, {"role": "user", "content": "Sure?"}]
    client.responses.create(model=NAME, tools=[READ], input=refer)
    continued: Any = {"previous_response_id": second.id, "input": "Sure?"}
    client.responses.create(model=NAME, tools=[READ], **continued)
    assert prompts[2] == prompts[3]
    wrongs: Any = ([*refer, refer[0]], [{"type": "item_reference", "id": "a"}])
    for wrong in wrongs:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=NAME, input=wrong)
        assert refused.value.param == "input"
    script.says("Gone.")
    gone = client.responses.create(**ASK)
    client.responses.delete(gone.id)
    refer = [{"id": gone.output[0].id}]
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=NAME, input=refer)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(gone.id)
    for query in ({"limit": 0}, {"limit": 101}, {"order": "no"}, {"after": "no"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(second.id, extra_query=query)


def test_nothing_in_the_background_is_read_or_cancelled(client: OpenAI, script: Script) -> None:
    script.says("A.")
    response = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_a")
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(response.id, stream=True)
