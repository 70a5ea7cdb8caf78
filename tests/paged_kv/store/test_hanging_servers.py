"""A server that hangs keeps nobody waiting for longer than the time-out of a connection."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import pytest

from tests.support.patience import SHORT_PATIENCE_S
from tests.support.stored_prompts import TEXT, remote_factory, shallow_model, store_of
from tests.support.tier_servers import s3_credentials
from tests.support.tier_servers import secret as secret

# Of a page of a large model. A wait that allows for its transfer at 20 MB/s takes five seconds.
ENTRY_BYTES = 100 << 20


def shortest_wait(model: Any, secret: Path, address: str) -> float:
    """Seconds that a prompt waits for a server's pages which never come, on a machine that may be
    busy with other things now and then."""
    waits = []
    for _ in range(3):
        factory = remote_factory(model, secret, address)
        began = perf_counter()
        assert factory.fetch_cache(TEXT[:1100])[1] == 0
        waits.append(perf_counter() - began)
        assert sum(store_of(factory).stats().errors.values()) >= 1
        factory.close()
    return min(waits)


@pytest.mark.slow
def test_a_bucket_that_hangs_before_it_sends_an_entry(secret: Path) -> None:
    pytest.importorskip("obstore")
    with silent_bucket() as address, s3_credentials():
        assert shortest_wait(shallow_model("qwen3"), secret, address) < SHORT_PATIENCE_S


@contextmanager
def silent_bucket() -> Iterator[str]:
    """A server of S3's protocol that says how long objects are, and sends none."""
    is_over = Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.send_response(200)
            for name, value in (
                ("Content-Length", str(ENTRY_BYTES)),
                ("ETag", '"a"'),
                ("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT"),
            ):
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            is_over.wait()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    serving = Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"s3://bucket?endpoint=http://127.0.0.1:{server.server_port}&region=here"
    finally:
        is_over.set()
        with suppress(OSError):
            server.shutdown()
        serving.join()
        server.server_close()
