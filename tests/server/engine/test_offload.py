"""A server with pages out of memory answers contexts that memory does not hold."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from paged_kv.server.engine.generation_thread import MOST_FAILED_STEPS
from tests.support.running_server import paged_server
from tests.support.tiny_model import BLOCK, completion, tokens_of

# A prompt has 16 pages.
MEMORY = 14 * BLOCK
PROMPTS = [tokens_of(number, 4050) for number in range(3)]


@pytest.mark.slow
def test_a_full_disk_ends_no_service(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    options = ["--model", tiny, "--max-kv-bytes", str(MEMORY), "--read-tokens", "768"]
    options += ["--offload", str(tmp_path), "--wait-for-pages"]
    with paged_server(*options) as running:
        with monkeypatch.context() as patches:
            patches.setattr(os, "pwrite", fails)
            for _ in range(MOST_FAILED_STEPS + 1):
                with pytest.raises(APIStatusError, match="No space left on device"):
                    completion(running, PROMPTS[0])
                assert completion(running, PROMPTS[0][:200])[0]
        assert completion(running, PROMPTS[0])[0]
