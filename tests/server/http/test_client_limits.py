"""Limits by key, and priorities."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, RateLimitError

from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import in_float32, paged_server, wait_until

LLAMA = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "64MB"]
NAME = "default_model"
GO_ON = {"0": -1000}


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
            # Long enough that a client reads its answer's end before the next one ends.
            body = {"priority": priority, "logit_bias": GO_ON}
            large.create(model=NAME, prompt="import os", max_tokens=40, extra_body=body)
            ended.append(priority)

        with ThreadPoolExecutor(3) as clients:
            for number, priority in enumerate((5, 0, -5), 1):
                clients.submit(ask, priority)
                wait_until(lambda: len(running.service.thread.jobs) > number)  # noqa: B023
            long.close()
        assert ended == [-5, 0, 5]
        assert small.create(model=NAME, prompt="import", max_tokens=1).choices
