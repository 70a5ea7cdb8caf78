"""Log lines hold what clients send, and clients can neither make lines nor control a terminal."""

import http.client
import logging
import re
import signal
from urllib.parse import quote

import pytest

from paged_kv.server.http.request_log import OneLine
from tests.support.patience import PATIENCE_S
from tests.support.server_process import ended, server_process

FORGED = "2026-11-23 10:00:00,000 - INFO - FORGED"
# Ends of lines of all kinds, and what terminals obey: colours, C1 controls, directions of text.
SAID = f"x\r\n{FORGED}\x0b\x0c\x1c\x1b[31m\x7f\x85\x9b1m\u2028\u2029\u202e\u200b\x00"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - [A-Z]+ - ")


def formatted(message: str, error: Exception | None = None, stack: str | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "file", 1, "got %s", (message,), info)
    record.stack_info = stack
    return OneLine().format(record)


def test_a_record_is_one_line() -> None:
    line = formatted(SAID)
    assert line.isprintable()
    assert LINE.match(line)
    assert f"got x\\r\\n{FORGED}\\x0b" in line
    assert formatted("caf\u00e9 \u65e5\u672c").endswith("got caf\u00e9 \u65e5\u672c")


def test_a_traceback_is_indented_below_its_line() -> None:
    first, *others = formatted("a", ValueError(SAID), f"Stack:\n{FORGED}").split("\n")
    assert LINE.match(first)
    assert len(others) >= 4
    assert all(line.startswith("    ") and line.isprintable() for line in others)


@pytest.mark.slow
def test_no_request_makes_a_line_of_its_own() -> None:
    with server_process() as (process, port):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        for method, path in (
            ("GET", f"/{quote(SAID)}"),
            ("GET", f"/v1/models/{quote(SAID)}"),
            ("POST", f"/v1/{quote(SAID)}"),
        ):
            client.request(method, path, headers={"X-Request-Id": "caf\u00e9 INFO"})
            assert client.getresponse().read()
        process.send_signal(signal.SIGTERM)
        status, error = ended(process)
        assert status == 0
        assert error.count("FORGED") == 3
        for line in error.splitlines():
            assert LINE.match(line), line
            assert line.isprintable()
