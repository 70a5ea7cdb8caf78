"""Soaks `paged-kv server` with 2,000 requests of 200 clients: python -m benches.server_soak

The requests, the clients and what is checked are those of tests/server/test_soak.py. The server is
a process of its own, on the embedded model in float32.
"""

from benches.openblas import LIBRARY

import argparse
import tempfile
from pathlib import Path

from benches.results_file import write_result
from tests.support.soak_questions import questions
from tests.support.soaking import BUSY_LLAMA, CALM, CLIENTS, STORE_BYTES, soaked

REQUESTS = 2_000
COUNTED = (
    "num_preemptions_total",
    "tokens_recomputed_total",
    "tokens_reread_total",
    "store_written_bytes_total",
    "store_read_bytes_total",
    "spec_decode_num_accepted_tokens_total",
    "generation_tokens_total",
    "kv_active_bytes",
)


def main() -> None:
    """Soak the server, and write what was found."""
    parser = argparse.ArgumentParser(description="Soaks paged-kv server.")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as name:
        found = soaked(CALM, BUSY_LLAMA, Path(name), requests, questions({}))
    figures = {
        "requests": requests,
        "clients": CLIENTS,
        "blas": LIBRARY,
        "truth": vars(found.truth),
        "differences": found.truth.differences(found.counted),
        "first": found.first,
        "last": found.last,
        "counted": {each: found.counted[each] for each in COUNTED},
        "store_limit_bytes": STORE_BYTES,
        "stored_bytes": found.stored_bytes,
        "seconds": found.seconds,
        "exit_status": found.status,
    }
    write_result("server_soak", figures)


if __name__ == "__main__":
    main()
