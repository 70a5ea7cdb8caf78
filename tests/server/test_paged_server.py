"""`paged-kv server` answers as mlx-lm's server does, from pages, and survives bad requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mlx_lm import server
from openai import APIStatusError, OpenAI

from paged_kv.server.engine.rows import Rows
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PagedRunningServer,
    RunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
    stock_server,
    wait_until,
)
from tests.support.zoo import small_model

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended for production")

# Never the token that ends a text.
GO_ON = {"0": -1000}
LLAMA, GEMMA = "stdlib-llama", "stdlib-gemma3"
NAMES = ["walk", "stat", "glob", "open"]


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


@pytest.fixture
def system(source_text: str) -> str:
    """More than a page of tokens, with which all conversations begin."""
    return source_text[20000:21100]


def options(model: str, *others: str) -> list[str]:
    return ["--model", str(MODEL_FOLDERS[model]), "--max-tokens", "8", *others]


def ask(client: OpenAI, messages: list[Any], **more: Any) -> tuple[str, int]:
    """The streamed answer, and the number of cached prompt tokens."""
    stream = client.chat.completions.create(
        model="default_model",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        **more,
    )
    text, cached = "", -1
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if chunk.usage:
            assert chunk.usage.prompt_tokens_details
            cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return text, cached


def converse(running: RunningServer, system: str, name: str, turns: int = 3) -> Any:
    """The answers of one conversation, and the number of cached tokens for each."""
    client = running.client()
    messages: list[Any] = [{"role": "system", "content": system}]
    answers, cached = [], []
    for turn in range(turns):
        question = f"\n\ndef {name}_{turn}(self, path):\n"
        messages.append({"role": "user", "content": question})
        text, count = ask(client, messages)
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
        cached.append(count)
    return answers, cached


def conversations(running: RunningServer, system: str) -> list[Any]:
    """Run all of them at the same time."""
    with ThreadPoolExecutor(len(NAMES)) as clients:
        talks = [clients.submit(converse, running, system, name) for name in NAMES]
        return [talk.result() for talk in talks]


@pytest.mark.slow
@pytest.mark.parametrize("model", [LLAMA, GEMMA])
def test_conversations_read_the_same_and_share_what_they_begin_with(
    model: str, system: str
) -> None:
    with stock_server(*options(model)) as running:
        stock = [answers for answers, _ in conversations(running, system)]
    with paged_server(*options(model, "--max-kv-bytes", "64MB")) as running:
        talks = conversations(running, system)
        assert [answers for answers, _ in talks] == stock
        for _, cached in talks:
            assert cached == sorted(cached)
            assert cached[1] > 256
            assert cached[2] > cached[1]
        again = converse(running, system, NAMES[0], turns=1)
        assert again[0] == stock[0][:1]
        assert again[1][0] > 256
        assert_idle_pools_hold_nothing(running)


def tokens_of(running: PagedRunningServer, text: str) -> list[int]:
    tokenizer: Any = running.provider.tokenizer
    tokens: list[int] = tokenizer.encode(text)
    return tokens


def token_budget(tokens: int) -> list[str]:
    """Options for a budget of so many tokens of the llama in float32."""
    return ["--max-kv-bytes", str(tokens * 6 * 2 * 2 * 64 * 4)]


@pytest.mark.slow
def test_what_can_never_fit_is_refused_at_once(system: str) -> None:
    with paged_server(*options(LLAMA, *token_budget(512))) as running:
        client = running.client()
        with pytest.raises(APIStatusError) as refused:
            client.completions.create(model="default_model", prompt=system * 3, max_tokens=5)
        assert refused.value.status_code == 400
        for part in ("tokens > 511 maximum", "holds 512", "--max-kv-bytes"):
            assert part in str(refused.value)
        answer = client.completions.create(
            model="default_model", prompt="import", max_tokens=512, logit_bias=GO_ON
        )
        assert answer.usage
        assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (512, "length")
        with pytest.raises(APIStatusError, match="the prompt has no tokens"):
            client.completions.create(model="default_model", prompt="")
        # The server serves every possible request to its end, whatever it has cached before.
        for prompt in (system + system[:600], system + system[:599]):
            tokens = len(tokens_of(running, prompt))
            answer = client.completions.create(
                model="default_model", prompt=prompt, max_tokens=512 - tokens, logit_bias=GO_ON
            )
            assert answer.usage
            assert answer.usage.total_tokens == 512
        assert_idle_pools_hold_nothing(running)


@pytest.mark.parametrize(
    ("model", "budget", "page_format"),
    [
        pytest.param(LLAMA, "3.2MB", "fp16", marks=pytest.mark.slow),
        (LLAMA, "5MB", "auto"),
        (GEMMA, "2.2MB", "fp16"),
    ],
)
@pytest.mark.slow
def test_requests_wait_for_memory_and_all_are_served(
    model: str, budget: str, page_format: str, system: str
) -> None:
    """The budget has room for two requests at a time, and for few of their prompts."""
    memory = ["--max-kv-bytes", budget, "--page-format", page_format]
    with paged_server(*options(model, *memory, "--admission", "reserve")) as running:
        questions = [system[start : start + 200] for start in range(0, 600, 100)]
        running.hold_until_submitted(len(questions))
        jobs = running.service.thread.jobs
        with ThreadPoolExecutor(len(questions)) as clients:
            answers = [
                clients.submit(
                    ask, running.client(), [{"role": "user", "content": text}], max_tokens=40
                )
                for text in questions
            ]
            wait_until(lambda: sum(job.stage == "waiting" for job in [*jobs.values()]) >= 3)
            assert all(answer.result()[0] for answer in answers)
        assert_idle_pools_hold_nothing(running)


def test_who_waits_too_long_is_told_to_come_again(system: str) -> None:
    patience = ["--admission-timeout", "0.3", "--admission", "reserve"]
    with paged_server(*options(LLAMA, *token_budget(1024), *patience)) as running:
        stream = running.client().completions.create(
            model="default_model", prompt=system, max_tokens=700, stream=True
        )
        next(stream)
        with pytest.raises(APIStatusError, match=r"could not begin in 0.3 s") as refused:
            ask(running.client(), [{"role": "user", "content": "import"}], max_tokens=600)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["Retry-After"] == "1"
        stream.close()
        running.wait_until_idle()
        # The server serves a prompt that does come again.
        assert ask(running.client(), [{"role": "user", "content": "import"}])[0]
        assert_idle_pools_hold_nothing(running)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [[], ["--draft-model", str(MODEL_FOLDERS[LLAMA])]])
def test_users_of_other_salts_share_nothing(draft: list[str], system: str) -> None:
    """The test checks what the cache finds, not the time."""
    with paged_server(*options(LLAMA, "--max-kv-bytes", "64MB", *draft)) as running:
        client = running.client()
        factory = running.provider.factories[0]
        messages = [{"role": "user", "content": system}]

        def cached(**body: Any) -> int:
            before = factory.stats().prefix_hits
            text, count = ask(client, messages, extra_body=body)
            texts.add(text)
            assert factory.stats().prefix_hits - before == count
            running.wait_until_idle()
            wait_until(lambda: not factory.stats().blocks_used)
            return count

        texts: set[str] = set()
        assert cached(cache_salt="alice") == 0
        assert cached(cache_salt="bob") == 0
        assert cached() == 0
        held = factory.stats().blocks_cached
        for body in ({"cache_salt": "alice"}, {"cache_salt": "bob"}, {}):
            assert cached(**body) > 256
        # Each of the three continues in blocks of its own.
        assert factory.stats().blocks_cached == held
        assert len(texts) == 1
        for salt in ("", 7):
            with pytest.raises(APIStatusError, match="cache_salt: ") as refused:
                cached(cache_salt=salt)
            assert refused.value.status_code == 400
        assert_idle_pools_hold_nothing(running)


@pytest.fixture
def loads_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers load a random hybrid, which reads the tokens of the llama's tokenizer."""
    load: Any = vars(server)["load"]

    def load_small(path: str, **kwargs: Any) -> Any:
        loaded = load(path, **kwargs)
        return (small_model("falcon_h1", vocab_size=loaded[1].vocab_size), *loaded[1:])

    monkeypatch.setattr(server, "load", load_small)


@pytest.mark.usefixtures("loads_hybrid")
@pytest.mark.slow
def test_a_hybrid_reads_from_the_last_page_on_where_the_answer_let_it_be_quantised(
    system: str,
) -> None:
    with paged_server(*options(LLAMA, "--max-kv-bytes", "64MB", "--page-format", "q8")) as running:
        tokens = len(tokens_of(running, system))
        last_page = (tokens - 2) // 256 * 256
        assert 256 <= last_page < 2048

        def cached_of_answer() -> int:
            answer = running.client().completions.create(
                model="default_model", prompt=system, max_tokens=300, temperature=0
            )
            running.wait_until_idle()
            assert answer.usage
            assert answer.usage.prompt_tokens_details
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        assert [cached_of_answer() for _ in range(2)] == [0, last_page]


@pytest.mark.slow
def test_penalties_of_a_request_alone_count_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a batch do."""
    penalty: Any = {"extra_body": {"repetition_penalty": 0.1, "repetition_context_size": 1000}}
    messages = [{"role": "user", "content": " ".join(NAMES)}]

    def answer() -> str:
        with paged_server(*options(LLAMA)) as running:
            return ask(running.client(), messages, **penalty)[0]

    expected = answer()
    monkeypatch.setattr(Rows, "_is_alone", lambda rows, prompt: True)
    assert answer() == expected
