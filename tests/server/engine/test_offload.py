"""A server with pages out of memory answers contexts that memory does not hold."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from paged_kv.server.engine.generation_thread import MOST_FAILED_STEPS
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    in_float32,
    paged_server,
)

# A page has 1.7 MB, and a prompt 16 pages.
MEMORY = 22
PROMPTS = [[(11 * i * i + 5 * i + k) % 500 + 1 for i in range(4050)] for k in range(3)]


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    with in_float32():
        yield


def options(folder: Path) -> list[str]:
    given = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", f"{MEMORY}MB"]
    return [*given, "--read-tokens", "768", "--offload", str(folder), "--wait-for-pages"]


def count_of(running: PagedRunningServer, prompt: list[int]) -> int:
    """Tokens that the server generates behind a prompt."""
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logit_bias": {"0": -1000}}
    answer = running.client().completions.create(model="default_model", prompt=prompt, **settings)
    assert answer.usage is not None
    return int(answer.usage.completion_tokens)


@pytest.mark.slow
def test_requests_together_exceed_memory(tmp_path: Path) -> None:
    with paged_server(*options(tmp_path)) as running:
        with ThreadPoolExecutor() as threads:
            running.hold_until_submitted(3)
            assert list(threads.map(lambda each: count_of(running, each), PROMPTS)) == [12] * 3
        (pool,) = running.pools
        stats = pool.stats()
        assert stats.bytes_mapped <= MEMORY * 10**6
        assert stats.requantisations["offloaded"] > 12
        assert stats.pages_fetched > 0
        assert_idle_pools_hold_nothing(running)


@pytest.mark.slow
def test_a_full_disk_ends_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with paged_server(*options(tmp_path)) as running:
        with monkeypatch.context() as patches:
            patches.setattr(os, "pwrite", fails)
            for _ in range(MOST_FAILED_STEPS + 1):
                with pytest.raises(APIStatusError, match="No space left on device"):
                    count_of(running, PROMPTS[0])
                assert count_of(running, PROMPTS[0][:200]) == 12
        assert count_of(running, PROMPTS[0]) == 12
