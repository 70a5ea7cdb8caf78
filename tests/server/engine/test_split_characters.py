"""Characters of several tokens: no part of a stream holds half of one."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.server.engine import sampling
from tests.support.running_server import PagedRunningServer
from tests.support.server_process import post

# Of two to four bytes each, joined and combined ones among them.
TEXT = "na\u00efve \u65e5\u672c\u8a9e \U0001f600 e\u0301\u00df \U0001f469\u200d\U0001f467 \u20ac."
HALF = "\ufffd"
PROMPT = [3] * 9


@pytest.fixture
def written(running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that the model writes, and then the end token."""
    tokenizer: Any = running.provider.tokenizer
    tokens: list[int] = tokenizer.encode(TEXT)
    script = mx.array([*tokens, *tokenizer.eos_token_ids])

    def dictated(seen: mx.array, logits: mx.array) -> mx.array:
        at = min(max(seen.size - len(PROMPT), 0), len(tokens))
        is_next = mx.arange(logits.shape[-1]) == script[at]
        return mx.broadcast_to(mx.where(is_next, 0.0, -1e9), logits.shape)

    monkeypatch.setattr(sampling, "logits_processors", lambda _: [dictated])
    assert sum(HALF in tokenizer.decode([token]) for token in tokens) > 10
    return tokens


def whole(running: PagedRunningServer, **body: Any) -> str:
    said = json.loads(post(running.port, prompt=PROMPT, temperature=0, **body).read())
    text: str = said["choices"][0]["text"]
    return text


def parts(running: PagedRunningServer, **body: Any) -> list[str]:
    """The texts of a stream's events, each of which the client decodes by itself."""
    stream = post(running.port, prompt=PROMPT, temperature=0, stream=True, **body)
    lines = stream.read().split(b"\n")
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]


@pytest.mark.parametrize("ask", [whole, lambda *it, **body: "".join(parts(*it, **body))])
@pytest.mark.parametrize("stop", ["\u8a9e", "\U0001f467", "\u0301\u00df", "\u20ac."])
def test_a_stop_text_may_begin_within_tokens(
    running: PagedRunningServer, written: list[int], stop: str, ask: Callable[..., str]
) -> None:
    assert ask(running, max_tokens=200, stop=stop) == TEXT[: TEXT.index(stop)]
