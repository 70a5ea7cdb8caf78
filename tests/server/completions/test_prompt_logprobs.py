"""Log probabilities of prompts: echo with logprobs, and prompt_logprobs."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.integrations.mlx_lm_internals import GeneratorParts
from paged_kv.server.completions import request_jobs
from paged_kv.server.engine import rows
from paged_kv.server.engine.rows import Rows
from tests.support.running_server import PagedRunningServer
from tests.support.server_process import post
from tests.support.tiny_model import completion, tokens_of

PROMPT = [(11 * i * i + 5 * i) % 500 + 1 for i in range(300)]
SHORT = PROMPT[:12]
END = {"0": 1000}


def asked(running: PagedRunningServer, **body: Any) -> Any:
    answer = post(running.port, **{"temperature": 0, **body})
    said = json.loads(answer.read())
    assert answer.status == 200, said
    return said


def direct(running: PagedRunningServer, tokens: list[int]) -> mx.array:
    """The log probabilities [tokens, vocabulary] behind each token, from one plain call."""
    model: Any = running.provider.model
    logits: mx.array = model(mx.array([tokens]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def test_an_echoed_prompt_has_the_log_probabilities_of_a_plain_call(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In parts of 64 tokens.
    monkeypatch.setattr(rows, "MOST_LOGITS", 64 * 4096)
    expected = direct(running, PROMPT)
    own: Any = [expected[at, token].item() for at, token in enumerate(PROMPT[1:])]
    best: Any = mx.max(expected, axis=-1).tolist()
    for _ in range(2):  # the second time the prompt is cached
        said = asked(running, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
        (choice,) = said["choices"]
        listed = choice["logprobs"]
        assert len(listed["tokens"]) == len(PROMPT) + 1
        assert (listed["token_logprobs"][0], listed["top_logprobs"][0]) == (None, None)
        assert listed["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-2)
        top = [max(each.values()) for each in listed["top_logprobs"][1:]]
        assert top == pytest.approx(best, abs=1e-2)
        assert choice["text"].startswith(running.provider.tokenizer.decode(PROMPT))  # type: ignore[attr-defined]  # mlx-lm's
        assert said["usage"]["completion_tokens"] == 1


def test_scored_prompts_share_a_batch_with_others_and_are_preempted(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, scored = [tokens_of(number, 290) for number in (7, 8)], {"prompt_logprobs": 2}
    expected = [completion(running, each)[0] for each in others]
    (alone,) = asked(running, prompt=PROMPT, **scored)["choices"]
    step, preempted = Rows.step, list[int]()

    def preempting(rows: Rows) -> Iterator[Any]:
        yield from step(rows)
        reading = GeneratorParts(rows._generator).reading.uids
        found = [uid for uid in reading if rows._reading[uid] is not None]
        if found and len(reading) > 1 and not preempted:
            preempted.append(found[0])
            rows._preemption.preempt(found[0])
            rows._factory.pool.clear()  # so that its first tokens are scored again

    monkeypatch.setattr(Rows, "step", preempting)
    running.pools[0].clear()
    running.hold_until_submitted(3)
    with ThreadPoolExecutor(3) as clients:
        texts = clients.map(lambda each: completion(running, each)[0], others)
        (choice,) = asked(running, prompt=PROMPT, **scored)["choices"]
        assert list(texts) == expected
    assert preempted
    assert choice["text"] == alone["text"]
    listed = [list(map(set, each["prompt_logprobs"][1:])) for each in (alone, choice)]
    assert listed[0] == listed[1]


def test_the_likeliest_token_has_the_same_number_in_both_lists(running: PagedRunningServer) -> None:
    """A client finds out by comparing them whether a text is what the model would write."""
    likeliest: list[Any] = mx.argmax(direct(running, SHORT), axis=-1).tolist()  # type: ignore[assignment]  # of one axis
    said = asked(running, prompt=[*SHORT, likeliest[-1]], echo=True, logprobs=1, max_tokens=1)
    listed = said["choices"][0]["logprobs"]
    assert listed["token_logprobs"][len(SHORT)] == max(listed["top_logprobs"][len(SHORT)].values())
    # The end token is listed behind an echoed prompt.
    for more, count in (({"logit_bias": END}, 13), ({"max_tokens": 0}, 12)):
        said = asked(running, prompt=SHORT, echo=True, logprobs=0, **more)
        assert len(said["choices"][0]["logprobs"]["token_logprobs"]) == count


@pytest.mark.parametrize("prompt", ["import os\n", [SHORT, PROMPT[5:9]], SHORT[:1]])
@pytest.mark.parametrize("most", [0, 3])
def test_an_echo_repeats_the_prompt_whole_and_streamed(
    running: PagedRunningServer, prompt: Any, most: int
) -> None:
    ask = {"prompt": prompt, "max_tokens": most, "n": 2}
    plain = asked(running, **ask)
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    decode: Any = running.provider.tokenizer.decode  # type: ignore[attr-defined]  # mlx-lm's
    texts = [each if isinstance(each, str) else decode(each) for each in prompts]
    expected = [texts[at // 2] + each["text"] for at, each in enumerate(plain["choices"])]
    ask["echo"] = True
    assert [each["text"] for each in asked(running, **ask)["choices"]] == expected
    numbered = asked(running, **ask, logprobs=2)["choices"]
    assert [each["text"] for each in numbered] == expected
    stream = post(running.port, **ask, logprobs=2, stream=True, temperature=0)
    streamed, tokens = [""] * len(expected), [0] * len(expected)
    for line in stream.read().decode().splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            streamed[choice["index"]] += choice["text"]
            tokens[choice["index"]] += len((choice["logprobs"] or {"tokens": []})["tokens"])
    assert streamed == expected
    assert tokens == [len(each["logprobs"]["tokens"]) for each in numbered]


def test_prompt_logprobs_have_ranks_and_likely_tokens(running: PagedRunningServer) -> None:
    expected = direct(running, SHORT)
    (choice,) = asked(running, prompt=SHORT, prompt_logprobs=3)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert (first, len(others), choice["logprobs"]) == (None, len(SHORT) - 1, None)
    for at, (token, listed) in enumerate(zip(SHORT[1:], others, strict=True)):
        value = expected[at, token].item()
        own = listed[str(token)]
        assert own["logprob"] == pytest.approx(value, abs=1e-2)
        likelier: Any = mx.sum(expected[at] > value).item()
        # Neighbours may change places by rounding.
        assert abs(own["rank"] - 1 - likelier) <= 20
        others_of = [each for key, each in listed.items() if key != str(token)]
        assert [each["rank"] for each in others_of] == [1, 2, 3]
        assert others_of[0]["logprob"] == pytest.approx(mx.max(expected[at]).item(), abs=1e-2)


def test_what_cannot_be_told_is_refused(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_jobs, "MOST_SCORES", 48)
    bodies: list[dict[str, Any]] = [
        {"prompt": SHORT, "prompt_logprobs": 1, "stream": True},
        {"prompt": SHORT, "prompt_logprobs": 4},
        {"prompt": [SHORT] * 3, "prompt_logprobs": 1},
        {"prompt": SHORT, "echo": True, "logprobs": 4},
    ]
    for body in bodies:
        answer = post(running.port, **body)
        error = json.loads(answer.read())["error"]
        assert (answer.status, error["param"]) == (400, "prompt_logprobs")
    assert asked(running, prompt=SHORT, prompt_logprobs=3)
