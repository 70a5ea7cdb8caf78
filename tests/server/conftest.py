"""The server that the tests of several interfaces ask. A file that needs another has its own."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.running_server import PagedRunningServer, noted_prompts, paged_server


@pytest.fixture(scope="module")
def running(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedRunningServer]:
    """A server of the model that says what a test wants, named "agent"."""
    from tests.support.agent_model import agent_folder

    folder = agent_folder(tmp_path_factory.mktemp("models"))
    with paged_server("--model", folder, "--max-kv-bytes", "64MB") as started:
        yield started


@pytest.fixture
def prompts(running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of all prompts, as the model reads them."""
    return noted_prompts(running, monkeypatch)
