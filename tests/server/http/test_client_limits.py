"""Limits by key, and priorities."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, RateLimitError
from starlette.requests import Request

from paged_kv.commands.arguments import PriorityRange
from paged_kv.server.http.access import Clients, Limits
from paged_kv.server.http.api_errors import APIError
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import in_float32, paged_server, wait_until

LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "64MB"]
NAME = "default_model"
GO_ON = {"0": -1000}
DEFAULT = Limits(PriorityRange(0, 100))


def test_requests_are_counted_by_key() -> None:
    clients = Clients({"a": Limits(PriorityRange(0, 0), 2), "b": DEFAULT}, DEFAULT)
    a, b = [
        clients.require(Request({"type": "http", "headers": [(b"x-api-key", key)]}))
        for key in (b"a", b"b")
    ]
    with clients.entered(a), clients.entered(a), clients.entered(b):
        with pytest.raises(APIError) as refused, clients.entered(a):
            pass
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"]
    with clients.entered(a):
        pass
    assert not clients._inside
    clients.require_priority(b, 100)
    for client, priority in ((a, 1), (a, -1), (b, 101)):
        with pytest.raises(APIError, match="you may ask"):
            clients.require_priority(client, priority)


@pytest.mark.slow
def test_a_server_limits_keys_and_lets_the_lowest_priority_begin(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("small requests=1\nlarge priorities=-5:5\n")
    options = ["--api-key", str(keys), "--decode-concurrency", "1"]
    with in_float32(), paged_server(*LLAMA, *options) as running:
        small, large = (running.client(api_key=key).completions for key in ("small", "large"))
        long: Any = small.create(
            model=NAME, prompt="import", max_tokens=4000, stream=True, logit_bias=GO_ON
        )
        next(iter(long))
        with pytest.raises(RateLimitError) as refused:
            small.create(model=NAME, prompt="import", max_tokens=1)
        assert refused.value.response.headers["retry-after"] == "1"
        with pytest.raises(BadRequestError, match="priority"):
            large.create(model=NAME, prompt="import", extra_body={"priority": 6})
        ended: list[int] = []

        def ask(priority: int) -> None:
            body = {"priority": priority}
            large.create(model=NAME, prompt="import os", max_tokens=3, extra_body=body)
            ended.append(priority)

        with ThreadPoolExecutor(3) as clients:
            for number, priority in enumerate((5, 0, -5), 1):
                clients.submit(ask, priority)
                wait_until(lambda: len(running.service.thread.jobs) > number)  # noqa: B023
            long.close()
        assert ended == [-5, 0, 5]
        assert small.create(model=NAME, prompt="import", max_tokens=1).choices
