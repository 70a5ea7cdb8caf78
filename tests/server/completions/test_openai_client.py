"""The answers that the openai package's client gets have the shapes of OpenAI's API."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.support.running_server import FEW_LIKELY, PagedRunningServer, paged_server, stock_server

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended for production")

NAME = "default_model"
PROMPT = "import os\n"
GO_ON = {"0": -1000}


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[PagedRunningServer]:
    options = ["--model", tiny, "--max-tokens", "8", "--served-model-name", "llama", "small"]
    with paged_server(*options, "--max-kv-bytes", "64MB") as started:
        yield started


@pytest.fixture
def client(running: PagedRunningServer) -> Iterator[OpenAI]:
    with running.client() as opened:
        yield opened


def test_several_prompts_and_choices_are_numbered_by_prompt(
    client: OpenAI, running: PagedRunningServer
) -> None:
    alone = [client.completions.create(model=NAME, prompt=each).choices[0].text
             for each in (PROMPT, "class A")]  # fmt: skip
    answer = client.completions.create(model=NAME, prompt=[PROMPT, "class A"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0]] * 2 + [alone[1]] * 2
    assert answer.usage
    assert answer.usage.completion_tokens == 4 * 8
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(
        model=NAME, prompt=[PROMPT, "class A"], n=2, stream=True
    ):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]
    # Prompts may be token ids.
    tokenizer: Any = running.provider.tokenizer
    tokens = tokenizer.encode(PROMPT)
    for prompt in (tokens, [tokens]):
        assert client.completions.create(model=NAME, prompt=prompt).choices[0].text == alone[0]


@pytest.mark.slow
def test_seeds_draw_the_same_in_any_company(client: OpenAI, tiny: str) -> None:
    def drawn(**more: Any) -> list[str]:
        answer = client.completions.create(
            model=NAME, prompt=PROMPT, temperature=1, max_tokens=16, extra_body=FEW_LIKELY, **more
        )
        return [choice.text for choice in answer.choices]

    alone = drawn(seed=5)
    assert drawn(seed=5) == alone != drawn(seed=6)
    assert drawn(seed=5, n=3)[0] == alone[0]
    assert len(set(drawn(seed=5, n=3))) > 1
    assert drawn(seed=-1) == drawn(seed=-1)
    # As mlx-lm's server samples, one at a time.
    with stock_server("--model", tiny) as stock, stock.client() as other:
        sent: Any = {"temperature": 1, "max_tokens": 16, "seed": 5, "extra_body": FEW_LIKELY}
        answer = other.completions.create(model=NAME, prompt=PROMPT, **sent)
    assert alone == [answer.choices[0].text]


def test_log_probabilities_of_completions(client: OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, logprobs=5)
    listed = answer.choices[0].logprobs
    assert listed
    assert listed.tokens
    assert listed.top_logprobs
    assert listed.token_logprobs
    assert "".join(listed.tokens) == answer.choices[0].text
    assert [len(top) for top in listed.top_logprobs] == [5] * 8
    for token, logprob, top in zip(
        listed.tokens, listed.token_logprobs, listed.top_logprobs, strict=True
    ):
        # Greedy: the chosen token is the likeliest.
        assert logprob == max(top.values()) == top[token]
    assert listed.text_offset == [len("".join(listed.tokens[:at])) for at in range(8)]
    none = client.completions.create(model=NAME, prompt=PROMPT, logprobs=0).choices[0].logprobs
    assert none
    assert none.top_logprobs == [{}] * 8


def test_log_probabilities_are_of_the_tokens_of_the_text(client: OpenAI) -> None:
    """Those of a stop text are not in it, whether they come at once or in a stream."""
    sent: Any = {"prompt": PROMPT, "max_tokens": 24, "logit_bias": GO_ON, "logprobs": 1}

    def asked(**more: Any) -> tuple[str, list[str]]:
        text, tokens = "", list[str]()
        for chunk in client.completions.create(model=NAME, stream=True, **sent, **more):
            (choice,) = chunk.choices
            text += choice.text
            tokens += (choice.logprobs and choice.logprobs.tokens) or []
        return text, tokens

    text, tokens = asked()
    assert "".join(tokens) == text
    # Some tokens that stand nowhere before.
    at = next(at for at in range(3, 24) if "".join(tokens[at : at + 3]) not in "".join(tokens[:at]))
    stop = "".join(tokens[at : at + 3])
    assert asked(stop=stop) == (text[: text.index(stop)], tokens[:at])
    # One that begins within a token.
    assert asked(stop=stop[1:])[1] in (tokens[:at], tokens[: at + 1])
    listed = client.completions.create(model=NAME, **sent, stop=stop).choices[0].logprobs
    assert listed
    assert listed.tokens == tokens[:at]
    # The end token is not in the text.
    (ended,) = client.completions.create(model=NAME, **sent | {"logit_bias": {"0": 1000}}).choices
    assert (ended.text, ended.logprobs) == ("", None)


def test_no_tokens_may_be_asked_for(client: OpenAI, running: PagedRunningServer) -> None:
    """As at OpenAI, whose conversations have at least one."""
    sent: Any = {"model": NAME, "prompt": [PROMPT, "class A"], "n": 2, "max_tokens": 0}
    generated = running.service.metrics.generation_tokens
    answer = client.completions.create(**sent)
    assert [(each.text, each.finish_reason) for each in answer.choices] == [("", "length")] * 4
    assert answer.usage
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens > 2) == (0, True)
    chunks = list(client.completions.create(**sent, stream=True))
    ends = [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in chunks]
    assert sorted(ends) == [(index, "length") for index in range(4)]
    assert running.service.metrics.generation_tokens == generated


def test_log_probabilities_of_conversations(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    sent: Any = {"model": NAME, "messages": messages, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**sent).choices
    listed = choice.logprobs and choice.logprobs.content
    assert listed
    assert "".join(each.token for each in listed) == choice.message.content
    for each in listed:
        assert each.bytes == list(each.token.encode())
        assert each.top_logprobs[0].logprob == each.logprob
        assert len(each.top_logprobs) == 3
    parts = [
        part.choices[0].logprobs for part in client.chat.completions.create(**sent, stream=True)
    ]
    streamed = [each for part in parts for each in (part and part.content) or []]
    assert [each.token for each in streamed] == [each.token for each in listed]


def test_every_answer_has_the_name_of_its_request(
    client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        answer = client.completions.create(
            model=NAME, prompt=PROMPT, extra_headers={"X-Request-Id": "my-own.1"}
        )
        assert answer.id == "cmpl-my-own.1"
        assert answer._request_id == "my-own.1"
        other = client.completions.with_raw_response.create(
            model=NAME, prompt=PROMPT, extra_headers={"X-Request-Id": "not one\tof ours"}
        )
    assert len(other.headers["X-Request-Id"]) == 32
    assert any("my-own.1: begins" in record.getMessage() for record in caplog.records)
