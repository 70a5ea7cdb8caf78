"""Log lines hold what clients send, and clients can neither make lines nor control a terminal."""

import logging
import re

from paged_kv.server.http.request_log import OneLine

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
