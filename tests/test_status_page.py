"""What `paged-kv server` tells about its pools: metrics, and a page, seen in a real browser."""

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from paged_kv import extras
from paged_kv.integrations import status_page
from tests.conftest import MODEL_FOLDERS
from tests.running_server import RunningServer, paged_server, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended for production")

ARTEFACTS = Path(__file__).resolve().parents[1] / "artefacts"


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    gc.collect()
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-tokens", "8"]
    with paged_server(*options, "--max-kv-bytes", "64MB") as server:
        ask(server, "import os\n" * 200)
        yield server


def ask(server: RunningServer, prompt: str) -> None:
    server.client().completions.create(model="default_model", prompt=prompt)
    server.wait_until_idle()


def get(server: RunningServer, path: str) -> Any:
    return urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30)


def test_metrics(running: RunningServer) -> None:
    pytest.importorskip("prometheus_client")
    with get(running, "/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    names = {line.split("{")[0] for line in lines if not line.startswith("#")}
    assert {
        "paged_kv:kv_cache_usage_perc",
        "paged_kv:prefix_cache_queries_total",
        "paged_kv:prefix_cache_hits_total",
        "paged_kv:cow_copies_total",
        "paged_kv:allocation_failures_total",
        "paged_kv:gather_fallbacks_total",
        "paged_kv:kv_blocks",
    } <= names
    asked = [line for line in lines if "prefix_cache_queries_total{" in line]
    assert any(float(line.split()[-1]) > 100 for line in asked)


def test_data_is_what_the_pools_hold_and_not_how_the_server_was_started(
    running: RunningServer,
) -> None:
    with get(running, "/kv/data") as answer:
        view = json.load(answer)
        assert answer.headers["Access-Control-Allow-Origin"] is None
    numbers = [pool.serial for pool in running.pools]
    (pool,) = [each for each in view["pools"] if each["number"] in numbers]
    assert pool["stats"]["bytes_budget"] == 64_000_000
    assert pool["stats"]["blocks_cached"] == running.pools[0].stats().blocks_cached > 0
    assert view["command"] == ""


def test_other_paths_are_mlx_lms(running: RunningServer) -> None:
    with get(running, "/health") as answer:
        assert answer.status == 200
    with pytest.raises(HTTPError, match="404"):
        get(running, "/kv/other")


def test_without_the_extra_metrics_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name="prometheus_client")

    monkeypatch.setattr(extras, "import_module", missing)
    answer = status_page.metrics()
    assert answer.status == 501
    assert b"pip install 'paged-kv[metrics]'" in answer.content


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = status_page.page().content.decode()
    assert "http" not in page
    assert "src=" not in page
    assert "import" not in page


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium of the system, or playwright's own."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as driver:
        try:
            # Where everybody is root, Chromium's sandbox does not start.
            opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: install chromium, or run `playwright install`: {error}")
        yield opened
        opened.close()


def test_the_page_follows_the_pools_in_a_browser(running: RunningServer, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    wrong: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    address = f"http://127.0.0.1:{running.port}"
    page.goto(f"{address}/kv")
    page.wait_for_selector("section .map i")
    stats = running.pools[0].stats()

    def cells() -> int:
        return int(page.locator("section").first.locator(".map i").count())

    assert page.locator("section").count() == len(running.pools)
    assert cells() == stats.blocks_used + stats.blocks_cached + stats.blocks_free
    text = page.locator("table.bytes").first.inner_text()
    assert "= mapped" in text
    assert page.locator("#state").inner_text().startswith("process ")
    colours = page.evaluate(
        "[...document.querySelectorAll('.map i')].map(cell => getComputedStyle(cell).background)"
    )
    assert any("240, 192, 90" in colour for colour in colours), "no cell is cached"
    before = cells()
    for number in range(3):
        ask(running, f"def f{number}(x):\n    return x\n" * 60)
    assert running.pools[0].stats().slabs > stats.slabs
    wait_until(lambda: cells() > before)
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "status_page.png", full_page=True)
    assert not wrong
    assert {url.removeprefix(address) for url in asked} <= {"/kv", "/kv/data"}
    page.route("**/kv/data", lambda route: route.abort())
    page.wait_for_selector("#state.lost")
