"""Structured output: what an answer must fit, it fits, whatever else the request asks for."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import BadRequestError

from paged_kv.integrations.speculation import generator
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.integrations.speculation.drafts import NGramDraft
from paged_kv.server.completions import service
from tests.support.agent_model import Script, agent_folder
from tests.support.running_server import PagedRunningServer, paged_server
from tests.support.tiny_model import BLOCK

LARGE = ["--max-kv-bytes", "64MB"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True},
}
# After `{"p` each of them may come, which are more than llguidance follows at once.
MANY: dict[str, Any] = {
    "type": "object",
    "properties": {f"p{number}": {} for number in range(2500)},
    "required": ["p2499"],
}
MESSAGES: Any = [{"role": "user", "content": "import os\n"}]
TOOL: Any = {"type": "function", "function": {"name": "trip", "parameters": SCHEMA}}
# The hottest that answers get; a model of 4,096 tokens says anything then.
HOT: dict[str, Any] = {"temperature": 2, "max_tokens": 400}


def chat(running: PagedRunningServer, **body: Any) -> Any:
    create: Any = running.client().chat.completions.create
    return create(model="default_model", messages=MESSAGES, **{**HOT, **body})


def assert_fits(choice: Any) -> None:
    assert choice.finish_reason == "stop"
    text = choice.message.content
    assert Draft202012Validator(SCHEMA).is_valid(json.loads(text)), text


def test_every_choice_fits_the_schema(running: PagedRunningServer) -> None:
    answer = chat(running, response_format=FORMAT, n=3, seed=3)
    for choice in answer.choices:
        assert_fits(choice)
    assert len({choice.message.content for choice in answer.choices}) > 1


@pytest.mark.slow
def test_a_batch_fits_with_all_other_options(running: PagedRunningServer) -> None:
    """Sequences with and without grammars, penalties, biases, seeds and stop texts run together."""
    options: list[dict[str, Any]] = [
        {"response_format": FORMAT},
        {"response_format": FORMAT, "temperature": 0},
        {"response_format": FORMAT, "seed": 1, "presence_penalty": 1.5, "frequency_penalty": 1},
        {"response_format": FORMAT, "logit_bias": {"0": 100, "300": 50}},
        {"response_format": FORMAT, "extra_body": {"repetition_penalty": 2.0, "top_k": 5}},
        {"response_format": FORMAT, "top_p": 0.5, "extra_body": {"min_p": 0.2}},
        {"response_format": FORMAT, "extra_body": {"xtc_probability": 1.0}},
    ]
    plain: list[dict[str, Any]] = [{"max_tokens": 40, "seed": 4}, {"max_tokens": 60}]
    running.hold_until_submitted(len(options) + len(plain))
    with ThreadPoolExecutor(len(options) + len(plain)) as clients:
        answers = list(clients.map(lambda body: chat(running, **body), options + plain))
    for answer in answers[: len(options)]:
        assert_fits(answer.choices[0])
    for answer in answers[len(options) :]:
        with pytest.raises(json.JSONDecodeError):  # which a grammar would have kept it from
            json.loads(answer.choices[0].message.content)


def test_a_stop_text_ends_an_answer_within_its_schema(running: PagedRunningServer) -> None:
    text = chat(running, response_format=FORMAT, stop=['"days"']).choices[0].message.content
    assert re.fullmatch(r'\{\s*"city"\s*:\s*"(Paris|Rome)"\s*,\s*', text)


VLLMS: list[tuple[Any, ...]] = [
    ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ({"json": {"enum": ["Paris", 5]}}, '"Paris"|5'),
    ({"grammar": 'start: "<" NUMBER ">"\nNUMBER: /[0-9]{2}/\n'}, "<[0-9][0-9]>"),
    ({"grammar": 'root ::= "a" | "b" root\n'}, "b*a"),
    ({"choice": ["yes", "no", 'a "quoted"\nline']}, '(yes|no|a "quoted"\nline)'),
    ({"json": json.dumps({"enum": ["Paris", 5]})}, '"Paris"|5'),
    ({"json_object": True}, r"(?s)\{.*"),
]


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in VLLMS[2:]]


@pytest.mark.parametrize(("outputs", "pattern"), [*VLLMS[:2], *SLOW])
def test_vllms_structured_outputs(
    outputs: dict[str, Any], pattern: str, running: PagedRunningServer
) -> None:
    create: Any = running.client().completions.create
    asked = {"temperature": 2, "max_tokens": 80, "extra_body": {"structured_outputs": outputs}}
    (choice,) = create(model="default_model", prompt="import os\n", **asked).choices
    assert re.fullmatch(pattern, choice.text)
    assert choice.finish_reason == "stop" or "json_object" in outputs


@pytest.mark.slow
def test_compiling_has_a_limit_of_time_and_disturbs_nobody(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # llguidance takes seconds for so many properties.
    slow = {"type": "object", "properties": {f"p{number}": {} for number in range(15_000)}}
    monkeypatch.setattr(service, "COMPILE_S", 1)
    with ThreadPoolExecutor(1) as client:
        refused = client.submit(chat, running, response_format=_format(slow))
        assert_fits(chat(running, response_format=FORMAT).choices[0])
        assert isinstance(refused.exception(), BadRequestError)
        assert "longer than 1 s" in str(refused.exception())


def test_compiling_has_a_limit_of_memory(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"enum": [f"{number} " * 2 for number in range(16_000)]}
    monkeypatch.setattr(service, "COMPILE_BYTES", 20_000_000)
    with pytest.raises(BadRequestError, match="compiling it takes more than 20,000,000 bytes"):
        chat(running, response_format=_format(large))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (MANY, "too large to follow"),
        pytest.param(
            *({"type": "string", "pattern": "^(a{1000}){1000}$"}, "s each: make it|too large"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_grammar_whose_masks_take_long_is_refused(
    schema: dict[str, Any], said: str, running: PagedRunningServer
) -> None:
    with pytest.raises(BadRequestError, match=said):
        chat(running, response_format=_format(schema))


def _format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


# Its keys leave the model no choice.
FORCED = {
    "type": "object",
    "properties": {
        "the_name_of_the_function": {"enum": ["push", "pop"]},
        "the_number_of_its_arguments": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["the_name_of_the_function", "the_number_of_its_arguments"],
    "additionalProperties": False,
}


def test_what_a_grammar_forces_is_drafted(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was said before that could be looked up."""
    monkeypatch.setattr(generator, "DraftLengths", FixedLengths)
    monkeypatch.setattr(NGramDraft, "may_follow", lambda *_: False)
    drafting = ["--draft-model", "ngram", "--num-draft-tokens", "8"]
    body: dict[str, Any] = {"response_format": _format(FORCED), "temperature": 0}
    with paged_server("--model", tiny, *LARGE, *drafting) as running:
        drafted = chat(running, **body)
        expected = chat(running, **body, extra_body={"num_draft_tokens": 0})
    assert drafted.choices == expected.choices
    details = drafted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 10
    assert details.rejected_prediction_tokens <= details.accepted_prediction_tokens / 4


def _letters(model: str, *options: str) -> tuple[list[str], Any]:
    """Letters that requests get which run together, and the pool's statistics. Each prompt has 2
    pages, and a third when it is answered."""
    body: dict[str, Any] = {"temperature": 1, "max_tokens": 60, "logit_bias": {"0": -1000}}
    body["extra_body"] = {"top_k": 4, "structured_outputs": {"regex": "[a-z]+"}}
    prompts = [[(11 * i * i + 5 * i + k) % 500 + 1 for i in range(470)] for k in range(4)]
    # Who runs beside whom does not depend on how quick this machine is.
    steps = ["--prefill-step-size", "256", "--decode-share", "0"]
    with paged_server("--model", model, *steps, *options) as running:
        running.hold_until_submitted(len(prompts))
        create: Any = running.client().completions.create
        with ThreadPoolExecutor(len(prompts)) as clients:
            asked = lambda k: create(model="default_model", prompt=prompts[k], seed=k, **body)  # noqa: E731
            answers = list(clients.map(asked, range(len(prompts))))
        return [answer.choices[0].text for answer in answers], running.pools[0].stats()


@pytest.mark.slow
def test_a_preempted_sequence_goes_on_within_its_grammar(tiny: str) -> None:
    expected, plenty = _letters(tiny, *LARGE)
    assert plenty.preemptions == 0
    assert all(re.fullmatch("[a-z]{60,}", text) for text in expected)
    small = ["--max-kv-bytes", str(10 * BLOCK), "--admission", "optimistic"]
    for draft in ([], ["--draft-model", "ngram"]):
        found, stats = _letters(tiny, *small, *draft)
        assert stats.preemptions > 0
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--draft-model", "ngram"]])
def test_thinking_does_not_end_an_answer(
    options: list[str], script: Script, tmp_path: Path
) -> None:
    """A model that wants to end while it thinks goes on until `max_tokens`."""
    with paged_server("--model", agent_folder(tmp_path), *LARGE, *options) as running:
        for asked in ({"response_format": FORMAT}, {"tools": [TOOL], "tool_choice": "required"}):
            script.says("<think>\nhm")
            (choice,) = chat(running, **asked, temperature=0, max_tokens=20).choices
            assert choice.finish_reason == "length"
            assert not choice.message.content
        script.says("<think>\nhm")
        (choice,) = chat(running, temperature=0, max_tokens=20).choices
        assert choice.finish_reason == "stop", "nothing is asked for, so thoughts will do"
