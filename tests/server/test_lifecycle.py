"""A server ends in order on a signal, and with exit status 1 after a failure."""

import http.client
import json
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from paged_kv.server import lifecycle
from paged_kv.server.engine import server_metrics
from paged_kv.server.engine.generation_thread import GenerationThread
from paged_kv.server.engine.rows import Rows
from tests.support.folders import MODEL_FOLDERS
from tests.support.grids import plain_only
from tests.support.running_server import PATIENCE_S, PagedRunningServer, wait_until
from tests.support.server_process import ended, metrics, post, server_process

MODEL = str(MODEL_FOLDERS["stdlib-llama"])
OPTIONS = ["--model", MODEL, "--max-tokens", "4", "--max-kv-bytes", "64MB"]
NAME = "default_model"
GO_ON = {"0": -1000}


@pytest.mark.slow
@pytest.mark.parametrize("number", plain_only([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_finishes_what_runs_and_stores_what_is_known(
    number: signal.Signals, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with server_process("--max-tokens", "4", "--store", str(store), "--store-after", "1") as (
        process,
        port,
    ):
        said = json.loads(post(port, prompt=[5] * 300, max_tokens=1, logprobs=True).read())
        known = [5] * 300 + [said["choices"][0]["logprobs"]["content"][0]["id"]]
        stream = post(port, stream=True, max_tokens=150, logit_bias=GO_ON)
        stream.readline()
        process.send_signal(number)
        refused = post(port)
        while refused.status == 200:  # The signal has not arrived yet.
            refused = post(port)
        assert refused.status == 503
        assert refused.headers["Retry-After"] == "1"
        assert b"shutting down" in refused.read()
        # The answer reaches its end, which comes after the signal.
        text = stream.read().decode()
        assert text.count('"finish_reason":"length"') == 1
        assert text.endswith("data: [DONE]\n\n")
        assert process.stderr is not None
        log = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0, log
        assert "terminate called" not in log
        assert "Traceback" not in log
    # The full page of the first prompt.
    running = PagedRunningServer(*OPTIONS, "--store", str(store), "--store-after", "1")
    answer = json.loads(post(running.port, prompt=[*known, 6, 6], max_tokens=1).read())
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    running.end()
    assert running.join() == 0


@pytest.mark.soak
@pytest.mark.parametrize(("max_tokens", "seconds"), [(60, PATIENCE_S), (4000, 1)])
def test_a_signal_finishes_or_cuts_fifty_streams(max_tokens: int, seconds: int) -> None:
    options = ["--shutdown-timeout", str(seconds), "--dtype", "float32"]

    def streamed(port: int) -> tuple[int, str]:
        answer = post(port, stream=True, max_tokens=max_tokens, logit_bias=GO_ON)
        return answer.status, answer.read().decode()

    def have_begun(port: int) -> bool:
        """As many as --decode-concurrency, and the others have come too."""
        told = metrics(port)
        ended = told.get("request_success_total.length", 0)
        running, waiting = told["num_requests_running"], told["num_requests_waiting"]
        return running + ended >= 32 and running + ended + waiting == 50

    with server_process(*options) as (process, port), ThreadPoolExecutor(50) as clients:
        streams = [clients.submit(streamed, port) for _ in range(50)]
        wait_until(lambda: have_begun(port))
        process.terminate()
        answers = [stream.result(PATIENCE_S) for stream in streams]
        status, log = ended(process)
    assert status == 0, log
    assert "Traceback" not in log
    refused = [text for status, text in answers if status == 503]
    begun = [text for status, text in answers if status == 200]
    assert len(begun) >= 32
    assert len(begun) + len(refused) == 50
    assert all("shutting down" in text for text in refused)
    for text in begun:
        assert text.endswith("data: [DONE]\n\n") == (max_tokens == 60)
        assert ('"finish_reason":"length"' in text) == (max_tokens == 60)
        assert ("shutting down" in text) == (max_tokens != 60)


def started(running: PagedRunningServer, max_tokens: int) -> Any:
    """A request whose answer another thread waits for."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            create: Any = running.client().completions.create
            answer.set_result(
                create(model=NAME, prompt="import", max_tokens=max_tokens, logit_bias=GO_ON)
            )
        except Exception as error:
            answer.set_exception(error)

    Thread(target=ask).start()
    wait_until(lambda: any(job.arguments.max_tokens == max_tokens
                           for job in list(running.service.thread.jobs.values())))  # fmt: skip
    return answer


def status_of(port: int, path: str) -> int:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    client.request("GET", path)
    return client.getresponse().status


def test_a_step_that_hangs_is_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, step = Event(), Rows.step

    def late(rows: Rows) -> Any:
        assert goes_on.wait(PATIENCE_S)
        return step(rows)

    monkeypatch.setattr(lifecycle, "LOOKED_S", 0.01)
    monkeypatch.setattr(Rows, "step", late)
    running = PagedRunningServer(*OPTIONS, "--step-timeout", "0.1")
    assert status_of(running.port, "/health") == 200
    answer = started(running, 3)
    wait_until(lambda: status_of(running.port, "/health") == 503)
    wait_until(lambda: "a step hangs" in caplog.text)
    (job,) = running.service.thread.jobs.values()
    assert caplog.text.count(f"{job.request_id}: waiting, 1 prompt tokens") == 1
    goes_on.set()
    assert answer.result(PATIENCE_S).usage.completion_tokens == 3
    assert status_of(running.port, "/health") == 200
    running.end()
    assert running.join() == 0


def test_a_step_hangs_if_it_takes_much_longer_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(server_metrics, "monotonic", lambda: now)
    watch = server_metrics.StepWatch(120)
    with watch.step():
        now = 10.0
    with watch.step():
        now += 190
        assert not watch.is_hanging
        now += 20
        assert watch.is_hanging
    assert not watch.is_hanging
    assert watch.age_s == 0


def test_a_request_that_meets_a_thread_that_has_just_died_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = GenerationThread.submit

    def too_late(thread: GenerationThread, jobs: Any) -> None:
        thread._commands.put(lambda _: sys.exit())
        assert thread.ended.result(PATIENCE_S) is False
        submit(thread, jobs)

    monkeypatch.setattr(lifecycle, "DEATH_NOTICE_S", PATIENCE_S)
    monkeypatch.setattr(GenerationThread, "submit", too_late)
    running = PagedRunningServer(*OPTIONS)
    refused = post(running.port)
    assert refused.status == 503
    assert json.loads(refused.read())["error"]["code"] == "dead"
    running.end()
    assert running.join() == 1
