"""What is written to a store: what prompts begin with again, within a budget of bytes a day, and
nothing of prompts that no store may keep."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, StoreOptions, Unstored
from paged_kv.store import blob_store
from paged_kv.store.blob_store import Outcome
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import PagedRunningServer, in_float32, paged_server
from tests.support.server_process import metrics
from tests.support.store_entries import (
    entry,
    is_right,
    links,
    open_store,
    prompt,
    put,
    stored_entries,
    stored_entry,
)
from tests.support.stored_prompts import TEXT, found, shallow_model, store_of, stored_factory
from tests.support.tiny_model import completion, tiny_folder, tokens_of

SECOND = StoreOptions(after=2)


def ask(model: Any, factory: PagedCacheFactory, tokens: list[int], salt: Any = None) -> None:
    """Answer a prompt as a server does, and forget it."""
    cache, cached = factory.fetch_cache(tokens, salt=salt)
    model(mx.array([tokens[cached:]]), cache=cache)
    mx.eval([layer.state for layer in cache])
    factory.insert_cache(tokens, cache, salt=salt)


def stored_tokens(folder: Path) -> int:
    places = [each.place for each in stored_entries(folder)]
    return sum(len(place.link.tokens) for place in places if place.part == "pages 0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("name", "first"),
    # Recurrent layers resume only where a prompt has ended, and the first two share no end.
    [("qwen3", 512), ("gemma3_text", 512), ("falcon_h1", 0)],
)
@pytest.mark.slow
def test_what_comes_once_is_not_written_and_what_comes_again_is(
    folder: Path, name: str, first: int
) -> None:
    model = shallow_model(name)
    factory = stored_factory(model, folder, store_options=SECOND)
    ask(model, factory, TEXT[:768])
    ask(model, factory, [*TEXT[:512], *TEXT[700:900]])
    factory.close()
    assert stored_tokens(folder) == 512
    assert found(model, folder, TEXT[:1000]) == first
    factory = stored_factory(model, folder, store_options=SECOND)
    ask(model, factory, TEXT[:768])
    ask(model, factory, TEXT[:1000])
    factory.close()
    assert found(model, folder, TEXT[:1100]) == 768


def test_counts_of_lookups_outlive_the_process(folder: Path) -> None:
    model = shallow_model("qwen3")
    for known in (0, 512):
        factory = stored_factory(model, folder, store_options=SECOND)
        ask(model, factory, TEXT[:600])
        factory.close()
        assert stored_tokens(folder) == known


@pytest.mark.parametrize("name", ["qwen3", "falcon_h1"])
@pytest.mark.parametrize("is_first", [True, False])
def test_nothing_of_an_unstored_prompt_is_written(folder: Path, name: str, is_first: bool) -> None:
    """Nor a page whose beginning belongs to another prompt."""
    model = shallow_model(name)
    factory = stored_factory(model, folder)
    asked = [(TEXT[:768], Unstored("a")), (TEXT[:600], "a")]
    for tokens, salt in asked if is_first else asked[::-1]:
        ask(model, factory, tokens, salt)
    # In memory they share what is cached.
    assert factory.fetch_cache(TEXT[:1000], salt="a")[1] == 768
    factory.close()
    blocks = {links(TEXT[:n], salt="a")[-1].tokens for n in (256, 512)}
    told = {each.place.link.tokens for each in stored_entries(folder)}
    assert told <= blocks
    assert blocks <= told or not is_first or name != "qwen3"


def test_unstored_prompts_are_not_counted_either(folder: Path) -> None:
    model = shallow_model("qwen3")
    factory = stored_factory(model, folder, store_options=SECOND)
    for _ in range(3):
        ask(model, factory, TEXT[:600], Unstored())
    ask(model, factory, TEXT[:600])
    factory.close()
    assert stored_tokens(folder) == 0


def test_a_day_has_a_budget_that_outlives_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = [20_000]
    monkeypatch.setattr(blob_store, "today", lambda: day[0])
    entries = [entry(link) for link in links(prompt(0, 1024))]
    with open_store(folder) as store:
        put(store, entries[:1])
        one = store.written.in_all
    assert one > 0
    with open_store(folder, daily_bytes=2 * one) as store:
        assert store.written.bytes_today == one
        outcomes = put(store, entries[1:3])
        assert outcomes == [Outcome.STORED, Outcome.BUDGET_SPENT]
        assert store.refusal(1) is Outcome.BUDGET_SPENT
    with open_store(folder, daily_bytes=2 * one) as store:
        assert put(store, entries[2:3]) == [Outcome.BUDGET_SPENT]
        assert (read := stored_entry(store, entries[0].place.key)) is not None
        assert is_right(read)
        day[0] += 1
        assert put(store, entries[2:3]) == [Outcome.STORED]
        assert (store.written.bytes_today, store.written.in_all) == (one, 3 * one)


def test_two_writers_share_one_budget(folder: Path) -> None:
    entries = [entry(link) for link in links(prompt(0, 1024))]
    with open_store(folder) as one, open_store(folder) as other:
        put(one, entries[:2])
        put(other, entries[2:])
        assert other.written.in_all == 2 * one.written.in_all


def test_wrong_options_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"after": 0}, {"at_once": 1.5}, {"daily_bytes": "10GBB"}]
    for options in wrong:
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            StoreOptions(**options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedRunningServer]:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-tokens", "4"]
    store = ["--store", str(tmp_path_factory.mktemp("pages") / "store")]
    with in_float32(), paged_server(*options, *store, "--max-kv-bytes", "64MB") as running:
        yield running


@pytest.mark.slow
def test_a_server_writes_what_is_asked_again_unless_it_is_told_not_to(
    server: PagedRunningServer,
) -> None:
    pytest.importorskip("prometheus_client")

    def written(text: str, **body: Any) -> float:
        asked = server.client().completions.create
        asked(model="default_model", prompt=text * 200, extra_body=body)
        server.wait_until_idle()
        (factory,) = server.service.thread.provider.factories
        store_of(factory).flush()
        return metrics(server.port)["store_written_bytes_total"]

    assert written("import os\n") == 0
    assert written("import re\n", store=False) == written("import re\n", store=False) == 0
    first = written("import os\n", store=True)
    assert first > 0
    assert metrics(server.port)["store_written_bytes_today"] == first


@pytest.mark.slow
def test_a_server_stores_the_states_where_the_last_page_of_a_prompt_begins(
    tmp_path: Path,
) -> None:
    """Of recurrent layers, which resume nowhere else."""
    model = tiny_folder(tmp_path / "model", "falcon_h1")
    options = ["--model", model, "--max-kv-bytes", "64MB", "--store-after", "1"]
    for cached in (0, 512):
        with paged_server(*options, "--store", str(tmp_path / "store")) as running:
            assert completion(running, tokens_of(0, 700), max_tokens=1)[1] == cached
