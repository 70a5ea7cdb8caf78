"""SIGTERM and SIGINT end a server's process whenever they come, and whatever it does."""

import http.client
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from tests.support.grids import plain_cases, plain_only
from tests.support.patience import PATIENCE_S
from tests.support.server_process import ended, post, read_until, server_process, starting_process

# Each starts a process.
pytestmark = pytest.mark.slow

SIGNALS = [signal.SIGTERM, signal.SIGINT]

# What Python says of imports, in their order, and the server of itself.
STARTING = ["mlx.core", "transformers", "mlx_lm.server", "uvicorn", "server.lifecycle"]
SERVING = ["listening at", "Started server process", "MB of pages", "ready at"]

SLOW_LOAD = """
import sys, time
from mlx_lm import server
from paged_kv.server.completions.service import Service
server.load = lambda *_, **__: time.sleep(60)
loaded = Service.loaded
async def noted(self):
    print("a request waits", file=sys.stderr, flush=True)
    return await loaded(self)
Service.loaded = noted
"""

# What keeps the process busy for half a minute after a signal.
BLOCKED_LOOP = """
import sys
from time import sleep
from paged_kv.server import lifecycle
lifecycle.LAST_S = 0.1
end = lifecycle.PagedServer.end
lifecycle.PagedServer.end = lambda self: (print("blocked", file=sys.stderr), sleep(30), end(self))
"""
HELD_INTERPRETER = BLOCKED_LOOP.replace("from time import sleep", "import ctypes").replace(
    "sleep(30)", "ctypes.PyDLL(None).sleep(30)"
)
HANGING_STEP = """
from time import sleep
from paged_kv.server import lifecycle
lifecycle.LAST_S = 0.1
lifecycle.GenerationThread._note_stop = lambda self: (sleep(30), setattr(self, "_stopped", True))
"""

LATE_IMPORTS = """
import sys, threading
class Finder:
    def find_spec(self, name, path=None, target=None):
        names = {thread.name for thread in threading.enumerate()}
        if "paged-kv-generate" in names - {threading.current_thread().name}:
            print("imported late:", name, file=sys.stderr)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("moment", "number"),
    plain_cases(
        [("transformers", signal.SIGINT), ("mlx_lm.server", signal.SIGTERM)],
        product(STARTING, SIGNALS),
    ),
)
def test_a_signal_ends_a_server_that_starts(moment: str, number: signal.Signals) -> None:
    with starting_process(python=("-X", "importtime")) as process:
        read_until(process, f"{moment}\n")
        process.send_signal(number)
        status, error = ended(process)
        # It may have begun to serve before the signal came.
        assert status in (128 + number, 0), error
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("moment", "number"),
    plain_cases([("listening at", signal.SIGINT)], product(SERVING, SIGNALS)),
)
def test_a_signal_ends_a_server_in_order_once_it_listens(
    moment: str, number: signal.Signals
) -> None:
    with starting_process() as process:
        read_until(process, moment)
        process.send_signal(number)
        status, error = ended(process)
        assert status == 0, error
        assert "Traceback" not in error


def models(port: int) -> http.client.HTTPResponse:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    client.request("GET", "/v1/models")
    return client.getresponse()


@pytest.mark.parametrize("number", plain_only([signal.SIGINT], SIGNALS))
def test_a_signal_ends_a_server_that_loads_its_model(number: signal.Signals) -> None:
    with server_process(first=SLOW_LOAD) as (process, port), ThreadPoolExecutor() as threads:
        answers = [threads.submit(each, port) for each in (post, models)]
        for _ in answers:
            read_until(process, "a request waits")
        process.send_signal(number)
        for refused in [each.result() for each in answers]:
            assert refused.status == 503
            assert b"shutting down" in refused.read()
        status, error = ended(process)
        assert status == 0, error
        assert "before the model has loaded" in error
        assert "Traceback" not in error


@pytest.mark.parametrize("number", plain_only([signal.SIGTERM], SIGNALS))
def test_a_second_signal_ends_the_process_at_once(number: signal.Signals) -> None:
    with server_process("--shutdown-timeout", "1000") as (process, port):
        stream = post(port, stream=True, max_tokens=100_000, logit_bias={"0": -1000})
        stream.readline()
        process.send_signal(number)
        read_until(process, "ending")
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 128 + signal.SIGINT


def test_a_second_signal_ends_a_process_whose_loop_is_blocked() -> None:
    with server_process("--shutdown-timeout", "1000", first=BLOCKED_LOOP) as (process, _):
        process.send_signal(signal.SIGTERM)
        read_until(process, "blocked")
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "busy", plain_only([HELD_INTERPRETER], [BLOCKED_LOOP, HELD_INTERPRETER, HANGING_STEP])
)
def test_the_time_to_end_holds_whatever_keeps_the_process_busy(busy: str) -> None:
    with server_process("--shutdown-timeout", "0.1", first=busy) as (process, port):
        assert post(port, max_tokens=1).status == 200
        process.send_signal(signal.SIGTERM)
        # With 0 it would have ended by itself, later.
        assert ended(process)[0] == 1


def test_nothing_of_the_server_is_imported_while_the_generation_thread_runs() -> None:
    """Two threads that import wait for each other's locks."""
    with server_process(first=LATE_IMPORTS) as (process, port):
        assert post(port, max_tokens=1, logprobs=True).status == 200
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        client.request("POST", "/v1/chat/completions", json.dumps(chat))
        assert client.getresponse().read()
        for path in ("/health", "/ready", "/v1/models", "/metrics", "/kv", "/kv/data", "/none"):
            client.request("GET", path)
            assert client.getresponse().read()
        process.send_signal(signal.SIGTERM)
        status, error = ended(process)
        assert status == 0
        late = [line.partition("late: ")[2] for line in error.splitlines() if "late: " in line]
        # A codec is imported when a text is first decoded with it.
        assert [name for name in late if not name.startswith("encodings.")] == []
