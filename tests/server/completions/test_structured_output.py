"""Structured output: what an answer must fit, it fits, whatever else the request asks for."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import APIError, BadRequestError

from paged_kv.integrations.grammar.vocabulary import CompiledGrammar
from paged_kv.integrations.speculation import generator
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.integrations.speculation.ngram_draft import NGramDraft
from paged_kv.server.completions import output_constraint
from tests.support.agent_model import agent_folder, dictated
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
)

LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "64MB"]
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


@pytest.fixture(scope="module", autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    with paged_server(*LLAMA) as server:
        yield server
        assert_idle_pools_hold_nothing(server)


def chat(running: PagedRunningServer, **body: Any) -> Any:
    create: Any = running.client().chat.completions.create
    return create(model="default_model", messages=MESSAGES, **{**HOT, **body})


def fits(text: str) -> bool:
    return bool(Draft202012Validator(SCHEMA).is_valid(json.loads(text)))


def assert_fits(choice: Any) -> None:
    assert choice.finish_reason == "stop"
    assert fits(choice.message.content), choice.message.content


def test_every_choice_fits_the_schema(running: PagedRunningServer) -> None:
    answer = chat(running, response_format=FORMAT, n=6, seed=3)
    for choice in answer.choices:
        assert_fits(choice)
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_stream_fits_the_schema(running: PagedRunningServer) -> None:
    parts = list(chat(running, response_format=FORMAT, stream=True, logprobs=True, top_logprobs=3))
    assert fits("".join(part.choices[0].delta.content or "" for part in parts))
    assert parts[-1].choices[0].finish_reason == "stop"


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
        assert not answer.choices[0].message.content.startswith("{")


def test_a_seed_says_the_same_alone_and_in_a_batch(running: PagedRunningServer) -> None:
    body = {"response_format": FORMAT, "seed": 11, "extra_body": {"top_k": 4}}
    alone = chat(running, **body).choices[0].message.content
    running.hold_until_submitted(4)
    with ThreadPoolExecutor(4) as clients:
        others = clients.map(lambda seed: chat(running, **body | {"seed": seed}), [1, 11, 2, 3])
    assert list(others)[1].choices[0].message.content == alone


def test_a_stop_text_ends_an_answer_within_its_schema(running: PagedRunningServer) -> None:
    text = chat(running, response_format=FORMAT, stop=['"days"']).choices[0].message.content
    assert re.fullmatch(r'\{\s*"city"\s*:\s*"(Paris|Rome)"\s*,\s*', text)


def test_json_objects(running: PagedRunningServer) -> None:
    answer = chat(running, response_format={"type": "json_object"}, temperature=0.5, max_tokens=800)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", 'a "quoted"\nline']}, '(yes|no|a "quoted"\nline)'),
        ({"json": SCHEMA}, r"\{[^{}]*\}"),
        ({"json": json.dumps(SCHEMA)}, r"\{[^{}]*\}"),
        ({"grammar": 'root ::= "a" | "b" root\n'}, "b*a"),
        ({"grammar": 'start: "<" NUMBER ">"\nNUMBER: /[0-9]{2}/\n'}, "<[0-9][0-9]>"),
    ],
)
def test_vllms_structured_outputs(
    outputs: dict[str, Any], pattern: str, running: PagedRunningServer
) -> None:
    create: Any = running.client().completions.create
    body = {"prompt": ["import os\n", "class A:\n"], "extra_body": {"structured_outputs": outputs}}
    for choice in create(model="default_model", **HOT, **body).choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "type"),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "1"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"grammar": "?!"}}, "structured_outputs", "GBNF"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "object"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "not"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs", "nothing"),
        (
            {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "give one",
        ),
        ({"structured_outputs": {"choice": ["a" * 200_000] * 2}}, "structured_outputs", "at most"),
    ],
)
def test_what_does_not_compile_is_refused(
    body: dict[str, Any], param: str, said: str, running: PagedRunningServer
) -> None:
    with pytest.raises(BadRequestError, match=said) as refused:
        chat(running, extra_body=body)
    assert (refused.value.param or "").startswith(param)


def test_compiling_has_a_limit_of_time_and_disturbs_nobody(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # llguidance takes seconds for so many properties.
    slow = {"type": "object", "properties": {f"p{number}": {} for number in range(15_000)}}
    monkeypatch.setattr(output_constraint, "TIME_LIMIT_S", 1)
    with ThreadPoolExecutor(1) as client:
        refused = client.submit(chat, running, response_format=_format(slow))
        assert_fits(chat(running, response_format=FORMAT).choices[0])
        assert isinstance(refused.exception(), BadRequestError)
        assert "longer than 1 s" in str(refused.exception())


def test_compiling_has_a_limit_of_memory(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"enum": [f"{number} " * 2 for number in range(16_000)]}
    monkeypatch.setattr(output_constraint, "MOST_BYTES", 20_000_000)
    with pytest.raises(BadRequestError, match="compiling it takes more than 20,000,000 bytes"):
        chat(running, response_format=_format(large))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "s each: make it simpler|too large"),
        (MANY, "too large to follow"),
    ],
)
def test_a_grammar_whose_masks_take_long_is_refused(
    schema: dict[str, Any], said: str, running: PagedRunningServer
) -> None:
    with pytest.raises(BadRequestError, match=said):
        chat(running, response_format=_format(schema))


def test_a_grammar_that_grows_too_large_ends_its_own_request(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short trial before a request begins has not met the part that cannot be followed."""
    monkeypatch.setattr(CompiledGrammar, "require_quick", lambda _: None)
    for stream in (False, True):
        with pytest.raises(APIError, match="too large or too slow to follow"):
            list(chat(running, response_format=_format(MANY), stream=stream))
    assert_fits(chat(running, response_format=FORMAT).choices[0])


def test_a_compiled_grammar_is_used_again(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat(running, response_format=FORMAT)
    monkeypatch.setattr(output_constraint, "_check", None)
    assert_fits(chat(running, response_format=FORMAT).choices[0])


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


def _drafted(*options: str) -> tuple[list[Any], Any]:
    """Answers of requests that run together, and the pool's statistics."""
    bodies: list[dict[str, Any]] = [
        {"response_format": _format(FORCED), "temperature": 0},
        {"response_format": FORMAT, "temperature": 0, "presence_penalty": 1.5, "logprobs": True},
        {"response_format": _format(FORCED), "seed": 1, "n": 3, "extra_body": {"top_k": 4}},
        {"response_format": FORMAT, "seed": 2, "logit_bias": {"300": 5}},
        {"temperature": 0, "max_tokens": 40},
    ]
    with paged_server(*LLAMA, *options) as running:
        running.hold_until_submitted(len(bodies))
        with ThreadPoolExecutor(len(bodies)) as clients:
            answers = list(clients.map(lambda body: chat(running, **body), bodies))
        stats = running.pools[0].stats()
        assert_idle_pools_hold_nothing(running)
    for answer in answers[:-1]:
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            json.loads(choice.message.content)
    choices = [choice for answer in answers for choice in answer.choices]
    tokens = [each.logprobs and [token.id for token in each.logprobs.content] for each in choices]
    return [(each.message.content, each.finish_reason) for each in choices] + tokens, stats


@pytest.mark.parametrize(
    "draft",
    [
        ["ngram", "--num-draft-tokens", "5"],
        pytest.param([str(MODEL_FOLDERS["stdlib-gemma3"])], marks=pytest.mark.slow),
    ],
    ids=["ngram", "model"],
)
def test_drafts_change_no_answer(draft: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "AdaptiveLengths", FixedLengths)
    expected, _ = _drafted()
    found, stats = _drafted("--draft-model", *draft)
    assert found == expected
    assert 0 < stats.accepted_tokens <= stats.draft_tokens


def test_what_a_grammar_forces_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was said before that could be looked up."""
    monkeypatch.setattr(generator, "AdaptiveLengths", FixedLengths)
    monkeypatch.setattr(NGramDraft, "may_follow", lambda *_: False)
    with paged_server(*LLAMA, "--draft-model", "ngram", "--num-draft-tokens", "8") as running:
        usage = chat(running, response_format=_format(FORCED), temperature=0).usage
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 10
    assert details.rejected_prediction_tokens <= details.accepted_prediction_tokens / 4


LONG: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "maximum": 99, "minimum": 10},
    "minItems": 160,
    "maxItems": 160,
}


def _arrays(*options: str) -> tuple[list[Any], Any]:
    """Arrays that requests get which run together, and the pool's statistics."""
    outputs = {"json": LONG}
    prompts = [[(11 * i * i + 5 * i + k) % 500 + 1 for i in range(245)] for k in range(4)]
    bodies = [
        {"prompt": prompt, "seed": seed, "extra_body": {"top_k": 4, "structured_outputs": outputs}}
        for seed, prompt in enumerate(prompts)
    ]
    with paged_server(*LLAMA[:2], "--prefill-step-size", "256", *options) as running:
        running.hold_until_submitted(len(bodies))
        create: Any = running.client().completions.create
        options_of: dict[str, Any] = {"model": "default_model", "temperature": 1}
        with ThreadPoolExecutor(len(bodies)) as clients:
            answers = clients.map(lambda body: create(**options_of, **body, max_tokens=900), bodies)
        return [answer.choices[0].text for answer in answers], running.pools[0].stats()


@pytest.mark.slow
@pytest.mark.parametrize("draft", [[], ["--draft-model", "ngram"]], ids=["plain", "drafts"])
def test_a_preempted_sequence_goes_on_within_its_grammar(draft: list[str]) -> None:
    expected, plenty = _arrays("--max-kv-bytes", "128MB")
    small = str(10 * 256 * 6 * 2 * 2 * 64 * 4)
    found, stats = _arrays("--max-kv-bytes", small, "--admission", "optimistic", *draft)
    assert plenty.preemptions == 0
    assert stats.preemptions > 0
    assert found == expected
    for text in found:
        assert Draft202012Validator(LONG).is_valid(json.loads(text))


@pytest.mark.parametrize("options", [[], ["--draft-model", "ngram"]])
def test_thinking_does_not_end_an_answer(options: list[str], tmp_path: Path) -> None:
    """A model that wants to end while it thinks goes on until `max_tokens`."""
    with dictated() as script, paged_server("--model", agent_folder(tmp_path), *options) as running:
        for asked in ({"response_format": FORMAT}, {"tools": [TOOL], "tool_choice": "required"}):
            script.says("<think>\nhm")
            (choice,) = chat(running, **asked, temperature=0, max_tokens=20).choices
            assert choice.finish_reason == "length"
            assert not choice.message.content
        script.says("<think>\nhm")
        (choice,) = chat(running, temperature=0, max_tokens=20).choices
        assert choice.finish_reason == "stop", "nothing is asked for, so thoughts will do"


def test_a_model_whose_caches_cannot_be_batched() -> None:
    with paged_server(*LLAMA, "--kv-bits", "8") as running:
        for choice in chat(running, response_format=FORMAT, n=2, presence_penalty=1).choices:
            assert_fits(choice)


def test_a_server_without_the_package_says_which_extra_is_missing(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, extra: str) -> Any:
        raise ValueError(f"this needs the package {name}: pip install 'paged-kv[{extra}]'")

    monkeypatch.setattr(output_constraint, "extra_module", missing)
    unknown = _format(SCHEMA | {"title": "unknown until now"})
    with pytest.raises(BadRequestError, match=re.escape("pip install 'paged-kv[structured]'")):
        chat(running, response_format=unknown)
