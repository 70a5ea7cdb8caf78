"""The answers that the openai package's client gets have the shapes of OpenAI's API."""

import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from openai import APIError, NotFoundError, OpenAI

from paged_kv.server.engine.batched_rows import BatchedRows
from paged_kv.server.engine.generation_thread import GenerationThread
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    FEW_LIKELY,
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
    stock_server,
)

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended for production")

MODEL = str(MODEL_FOLDERS["stdlib-llama"])
NAME = "default_model"
PROMPT = "import os\n"
GO_ON = {"0": -1000}


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    options = ["--model", MODEL, "--max-tokens", "8", "--served-model-name", "llama", "tiny"]
    with in_float32(), paged_server(*options, "--max-kv-bytes", "64MB") as started:
        yield started


@pytest.fixture
def client(running: PagedRunningServer) -> Iterator[OpenAI]:
    with running.client() as opened:
        yield opened
    assert_idle_pools_hold_nothing(running)


def test_several_prompts_and_choices_are_numbered_by_prompt(client: OpenAI) -> None:
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


def test_prompts_may_be_token_ids(client: OpenAI, running: PagedRunningServer) -> None:
    tokenizer: Any = running.provider.tokenizer
    tokens = tokenizer.encode(PROMPT)
    texts = [
        client.completions.create(model=NAME, prompt=prompt).choices[0].text
        for prompt in (PROMPT, tokens, [tokens], [PROMPT])
    ]
    assert len(set(texts)) == 1


def test_choices_share_the_pages_of_their_prompt(
    client: OpenAI, running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    step = BatchedRows.step

    def spied(rows: BatchedRows) -> Any:
        nonlocal most
        yield from step(rows)
        most = max(most, running.pools[0].snapshot().blocks_used)

    monkeypatch.setattr(BatchedRows, "step", spied)
    answer = client.completions.create(
        model=NAME, prompt=[3] * 1030, n=6, temperature=1, logit_bias=GO_ON
    )
    assert len({choice.text for choice in answer.choices}) > 1
    # Four full blocks are shared, and each answer has one of its own.
    assert 4 < most <= 4 + 6 + 1


@pytest.mark.slow
def test_seeds_draw_the_same_in_any_company(client: OpenAI, running: PagedRunningServer) -> None:
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
    options = ["--model", MODEL]
    with stock_server(*options) as stock, stock.client() as other:
        answer = other.completions.create(
            model=NAME, prompt=PROMPT, temperature=1, max_tokens=16, seed=5,
            extra_body=FEW_LIKELY,
        )  # fmt: skip
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


@pytest.mark.parametrize("is_chat", [False, True])
def test_log_probabilities_are_of_the_tokens_of_the_text(client: OpenAI, is_chat: bool) -> None:
    """Those of a stop text are not in it, whether they come at once or in a stream."""

    def asked(**more: Any) -> tuple[str, list[str]]:
        sent: Any = {"model": NAME, "max_tokens": 40, "logit_bias": GO_ON, "stream": True, **more}
        text, tokens = "", []
        if is_chat:
            sent["messages"] = [{"role": "user", "content": PROMPT}]
            for chunk in client.chat.completions.create(logprobs=True, **sent):
                (choice,) = chunk.choices
                text += choice.delta.content or ""
                tokens += [
                    each.token for each in (choice.logprobs and choice.logprobs.content) or []
                ]
        else:
            for chunk in client.completions.create(prompt=PROMPT, logprobs=1, **sent):
                (choice,) = chunk.choices
                text += choice.text
                tokens += (choice.logprobs and choice.logprobs.tokens) or []
        return text, tokens

    text, tokens = asked()
    assert "".join(tokens) == text
    # Some tokens that stand nowhere before.
    at = next(at for at in range(3, 40) if "".join(tokens[at : at + 3]) not in "".join(tokens[:at]))
    stop = "".join(tokens[at : at + 3])
    assert asked(stop=stop) == (text[: text.index(stop)], tokens[:at])
    # One that begins within a token.
    assert asked(stop=stop[1:])[1] in (tokens[:at], tokens[: at + 1])
    if not is_chat:
        answer = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=40, logit_bias=GO_ON, logprobs=0, stop=stop
        )
        listed = answer.choices[0].logprobs
        assert listed
        assert listed.tokens == tokens[:at]
        # The end token is not in the text.
        ends: Any = {"0": 1000}
        ended = client.completions.create(model=NAME, prompt=PROMPT, logit_bias=ends, logprobs=0)
        assert (ended.choices[0].text, ended.choices[0].logprobs) == ("", None)


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_may_be_asked_for(
    client: OpenAI, running: PagedRunningServer, stream: bool
) -> None:
    """As at OpenAI, whose conversations have at least one."""
    sent: Any = {"model": NAME, "prompt": [PROMPT, "class A"], "n": 2, "max_tokens": 0}
    generated = running.service.metrics.generation_tokens
    if stream:
        chunks = list(client.completions.create(**sent, stream=True))
        ends = [(chunk.choices[0].index, chunk.choices[0].finish_reason) for chunk in chunks]
        assert sorted(ends) == [(index, "length") for index in range(4)]
        return
    answer = client.completions.create(**sent)
    assert [(each.text, each.finish_reason) for each in answer.choices] == [("", "length")] * 4
    assert answer.usage
    assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens > 2
    assert running.service.metrics.generation_tokens == generated


def test_log_probabilities_of_conversations(client: OpenAI) -> None:
    asked: Any = {
        "model": NAME,
        "messages": [{"role": "user", "content": PROMPT}],
        "logprobs": True,
        "top_logprobs": 3,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.logprobs
    assert choice.logprobs.content
    text = "".join(each.token for each in choice.logprobs.content)
    assert text == choice.message.content
    for each in choice.logprobs.content:
        assert each.bytes == list(each.token.encode())
        assert each.top_logprobs[0].logprob == each.logprob
        assert len(each.top_logprobs) == 3
    streamed = [
        each
        for chunk in client.chat.completions.create(**asked, stream=True)
        for each in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    ]
    assert [each.token for each in streamed] == [each.token for each in choice.logprobs.content]


def test_what_is_impossible_has_a_log_probability_that_json_knows(client: OpenAI) -> None:
    bias: Any = {str(token): 10000.0 if token == 7 else -10000.0 for token in range(4096)}
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, logprobs=2, logit_bias=bias, max_tokens=1
    )  # fmt: skip
    listed = answer.choices[0].logprobs
    assert listed
    assert listed.top_logprobs
    assert min(listed.top_logprobs[0].values()) == -9999.0


def test_a_choice_ends_before_a_stop_word_however_its_tokens_are_cut(
    client: OpenAI, running: PagedRunningServer
) -> None:
    whole = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, logit_bias=GO_ON)
    text = whole.choices[0].text
    tokenizer: Any = running.provider.tokenizer
    # No token begins or ends there.
    word = text[11:19]
    for stop in (word, [word, "nowhere"]):
        answer = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=40, logit_bias=GO_ON, stop=stop
        )  # fmt: skip
        assert answer.choices[0].text == text[: text.index(word)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage
        assert answer.usage.completion_tokens <= len(tokenizer.encode(text))
    streamed = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=40, logit_bias=GO_ON, stop=word, stream=True
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(word)]


def test_the_model_is_served_under_all_its_names(client: OpenAI) -> None:
    names = [each.id for each in client.models.list()]
    assert names == ["llama", "tiny", "stdlib-llama"]
    for name in (*names, MODEL):
        assert client.completions.create(model=name, prompt=PROMPT, max_tokens=1).model == name
        assert client.models.retrieve(name).id == name
    assert client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1).model == "llama"
    with pytest.raises(
        NotFoundError, match="'gpt-4' is not served here: ask for 'llama'"
    ) as refused:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_an_unknown_name_lets_go_of_nothing(client: OpenAI, running: PagedRunningServer) -> None:
    (pool,) = running.pools
    client.completions.create(model=NAME, prompt=[3] * 600)
    running.wait_until_idle()
    held = pool.stats().blocks_cached
    with pytest.raises(NotFoundError):
        client.completions.create(model="/no/such/model", prompt=PROMPT)
    assert running.pools == [pool]
    assert pool.stats().blocks_cached == held > 0


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


def test_pages_of_other_origins_may_ask_and_may_not_look(running: PagedRunningServer) -> None:
    address = f"http://127.0.0.1:{running.port}"
    origin = {"Origin": "https://a.example"}
    for path, allowed in (("/v1/models", "*"), ("/kv/data", None), ("/metrics", None)):
        with urlopen(Request(address + path, headers=origin), timeout=PATIENCE_S) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == allowed
    asks = {**origin, "Access-Control-Request-Method": "POST"}
    preflight = Request(f"{address}/v1/completions", headers=asks, method="OPTIONS")
    with urlopen(preflight, timeout=PATIENCE_S) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == "*"


def test_an_error_in_a_stream_is_an_event_of_it(
    client: OpenAI, running: PagedRunningServer
) -> None:
    stream = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=500, stream=True, logit_bias=GO_ON
    )  # fmt: skip
    next(stream)
    thread: GenerationThread = running.service.thread
    thread._mailbox.put(lambda thread: thread._note_failed_step(RuntimeError("broken")))
    with pytest.raises(APIError, match="failed to compute"):
        list(stream)


def test_curl_reads_plain_json(running: PagedRunningServer) -> None:
    """As curl -d sends it: with the content type of a form."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
    asked = Request(f"http://127.0.0.1:{running.port}/v1/completions", body)
    with urlopen(asked, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        said = json.load(answer)
    assert set(said) == {
        *("id", "object", "created", "model", "system_fingerprint", "choices", "usage")
    }
    (choice,) = said["choices"]
    assert set(choice) == {"index", "finish_reason", "logprobs", "text"}
    assert set(said["usage"]) == {
        *("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
    }
