"""Pages in mlx-vlm's own server. `.ci/check_versions` runs these: they need the extra vlm."""

import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vlm")

import uvicorn
from mlx_vlm import apc
from mlx_vlm.server.app import app, get_cached_model, unload_model_sync
from mlx_vlm.server.runtime import runtime

from paged_kv import PagedCacheFactory
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.vision_folder import write_model_and_pictures

BYTES = 64 << 20
LONG = "import os\n" * 12


class OwnServer:
    """mlx-vlm's server in a thread of this process, with a model that it has loaded.

    Args:
        folder: has the model in `model`, and pictures.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model, self.processor, _ = get_cached_model(str(folder / "model"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._thread = Thread(target=self._server.run, args=[[self._socket]])
        self._thread.start()
        wait_until(lambda: self._server.started)

    def factory(self) -> PagedCacheFactory:
        return PagedCacheFactory(self.model, max_bytes=BYTES, processor=self.processor)

    def answer(self, question: tuple[str, str | None]) -> str:
        """The answer to a text, about a picture if one is named."""
        text, picture = question
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if picture is not None:
            data = base64.b64encode((self._folder / picture).read_bytes()).decode()
            url = {"url": f"data:image/png;base64,{data}"}
            content.insert(0, {"type": "image_url", "image_url": url})
        body = {
            "model": str(self._folder / "model"),
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
            "temperature": 0.0,
        }
        port = self._socket.getsockname()[1]
        request = Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=PATIENCE_S) as response:
            answer: str = json.load(response)["choices"][0]["message"]["content"]
        return answer

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        unload_model_sync()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    server = OwnServer(write_model_and_pictures(tmp_path_factory.mktemp("vision")))
    yield server
    server.stop()


def test_texts_and_pictures_at_once_get_the_same_answers(server: OwnServer) -> None:
    questions = [
        ("def read(path):", None),
        ("class A:", "red.png"),
        (LONG, None),
        ("class A:", "blue.png"),
    ]
    expected = [server.answer(question) for question in questions]
    assert expected[1] != expected[3]
    with server.factory() as factory, ThreadPoolExecutor(len(questions)) as clients:
        assert list(clients.map(server.answer, questions)) == expected
        wait_until(lambda: not factory.stats().bytes_active)
        # Not whether memory is mapped: an idle pool may have given all of it back.
        assert factory.pool.is_open
        assert factory.stats().gather_fallbacks == 0


def test_automatic_prefix_caching_leaves_models_with_pages_alone(
    server: OwnServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = apc.from_env(overrides={"enabled": True, "disk_enabled": False})
    assert manager is not None
    monkeypatch.setattr(runtime.response_generator, "apc_manager", manager)
    monkeypatch.setattr(runtime.response_generator, "apc_mode", "block")
    expected = [server.answer((LONG, None)) for _ in range(2)]
    before = manager.stats_snapshot()
    assert before["lookups_hit"] > 0
    with server.factory() as factory:
        assert [server.answer((LONG, None)) for _ in range(2)] == expected
        assert factory.pool.is_open
    assert manager.stats_snapshot() == before
    assert "automatic prefix caching (APC) is off" in caplog.text
    server.answer((LONG, None))
    assert manager.stats_snapshot()["lookups_hit"] > before["lookups_hit"]
