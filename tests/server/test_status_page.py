"""The metrics of `paged-kv server` and its status page, in a real browser."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.request import urlopen

import pytest

from paged_kv.allocator.allocator_stats import Unit
from paged_kv.pool.stats import COLUMNS
from tests.support.folders import MODEL_FOLDERS, ROOT
from tests.support.running_server import PagedRunningServer, in_float32, paged_server, wait_until

ARTEFACTS = ROOT / "artefacts"
# The rows of the page's table, and those of them that are no sums.
LABELS = [str(column.label) for column in COLUMNS if column.unit is Unit.HELD_BYTES]
PARTS = [label.removeprefix("+ ") for label in LABELS if not label.startswith("=")]
# The texts of the page's labels and numbers that take more than one line.
WRAPPED = """
[...document.querySelectorAll("th, td.number, td:first-child, .numbers span, .ended span")]
  .filter(each => {
    const range = document.createRange();
    range.selectNodeContents(each);
    return new Set([...range.getClientRects()].map(line => line.top)).size > 1;
  }).map(each => each.innerText)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedRunningServer]:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-tokens", "8"]
    options += ["--store", str(tmp_path_factory.mktemp("pages") / "store")]
    with in_float32(), paged_server(*options, "--max-kv-bytes", "64MB") as server:
        ask(server, "import os\n" * 200)
        yield server


def ask(server: PagedRunningServer, prompt: str) -> None:
    server.client().completions.create(model="default_model", prompt=prompt)
    server.wait_until_idle()


def test_metrics(running: PagedRunningServer) -> None:
    pytest.importorskip("prometheus_client")
    with urlopen(f"http://127.0.0.1:{running.port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    names = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
    assert {
        "paged_kv:kv_cache_usage_perc",
        "paged_kv:prefix_cache_queries_total",
        "paged_kv:prefix_cache_hits_total",
        "paged_kv:cow_copies_total",
        "paged_kv:allocation_failures_total",
        "paged_kv:gather_fallbacks_total",
        "paged_kv:kv_blocks",
        "paged_kv:num_requests_running",
        "paged_kv:num_requests_waiting",
        "paged_kv:num_preemptions_total",
        "paged_kv:num_requests_refused_total",
        "paged_kv:prompt_tokens_total",
        "paged_kv:prompt_tokens_cached_total",
        "paged_kv:generation_tokens_total",
        "paged_kv:request_success_total",
        "paged_kv:time_to_first_token_seconds_bucket",
        "paged_kv:request_time_per_output_token_seconds_sum",
        "paged_kv:e2e_request_latency_seconds_count",
        "paged_kv:store_hit_tokens_total",
        "paged_kv:store_written_bytes_total",
        "paged_kv:mlx_active_bytes",
        "paged_kv:mlx_cache_bytes",
        "paged_kv:mlx_peak_bytes",
    } <= names
    counted = running.service.metrics
    assert f"paged_kv:generation_tokens_total {float(counted.generation_tokens)}" in lines
    assert "paged_kv:num_requests_running 0.0" in lines
    asked = [line for line in lines if "prefix_cache_queries_total{" in line]
    assert any(float(line.split()[-1]) > 100 for line in asked)


@pytest.fixture
def browser() -> Iterator[Any]:
    """The one that takes the picture of the documents."""
    playwright = pytest.importorskip("playwright.sync_api")
    from benches.status_picture import browser

    with ExitStack() as stack:
        try:
            yield stack.enter_context(browser())
        except playwright.Error as error:
            pytest.skip(f"no browser: install chromium, or run `playwright install`: {error}")


@pytest.mark.slow
def test_the_page_follows_the_pools_in_a_browser(running: PagedRunningServer, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    wrong: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    address = f"http://127.0.0.1:{running.port}"
    page.goto(f"{address}/kv")
    # An earlier test that failed may still hold pools, which the page shows too.
    pool = f"#pool-{running.pools[0].serial}"
    page.wait_for_selector(f"{pool} .map i")
    stats = running.pools[0].stats()

    def cells() -> int:
        return int(page.locator(f"{pool} .map i").count())

    assert cells() == stats.blocks_used + stats.blocks_cached + stats.blocks_free
    rows = page.locator(f"{pool} table.bytes td:first-child").all_inner_texts()
    assert rows == LABELS
    legend = page.locator(f"{pool} .legend").first.locator("span").all_inner_texts()
    assert legend == [*PARTS, "not mapped"]
    assert f" cached {stats.blocks_cached} " in page.locator(f"{pool} .numbers").inner_text()
    assert page.locator("#state").inner_text().startswith("process ")
    colours = page.evaluate(
        "pool => [...document.querySelectorAll(`${pool} .map i`)]"
        ".map(cell => getComputedStyle(cell).background)",
        pool,
    )
    assert any("240, 192, 90" in colour for colour in colours), "no cell is cached"
    before = cells()
    for number in range(3):
        ask(running, f"def f{number}(x):\n    return x\n" * 60)
    assert running.pools[0].stats().slabs > stats.slabs
    wait_until(lambda: cells() > before)
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "status_page.png", full_page=True)
    wait_until(lambda: "0 running, 0 waiting" in page.locator("#requests").inner_text())
    page.set_viewport_size({"width": 720, "height": 900})
    assert page.evaluate(WRAPPED) == []
    page.set_viewport_size({"width": 390, "height": 844})
    # Nothing overflows to the side, except elements that scroll by themselves.
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.screenshot(path=ARTEFACTS / "status_page_390.png", full_page=True)
    assert not wrong
    assert {url.removeprefix(address) for url in asked} <= {"/kv", "/kv/data"}
    page.route("**/kv/data", lambda route: route.abort())
    page.wait_for_selector("#state.lost")
