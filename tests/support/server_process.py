"""Runs `paged-kv server` in a process of its own, as users do."""

import http.client
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from tests.support.folders import MODEL_FOLDERS
from tests.support.patience import PATIENCE_S

OPTIONS = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--max-kv-bytes", "64MB"]
MAIN = "\nimport sys\nfrom paged_kv.command_line import main\nsys.exit(main())"


@contextmanager
def server_process(*options: str, first: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server in a process that runs the program `first` before, and its port."""
    with starting_process(*options, first=first) as process:
        line = read_until(process, "listening at")
        yield process, int(line.rpartition(" ")[2])


@contextmanager
def starting_process(
    *options: str, first: str = "", python: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """The server in a process that has just begun, with options of Python."""
    program = ["-c", first + MAIN] if first else ["-m", "paged_kv"]
    command = [sys.executable, *python, *program, "server", *OPTIONS, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], part: str) -> str:
    """The next line of a process's standard error that contains this."""
    assert process.stderr is not None
    before = []
    for line in process.stderr:
        if part in line:
            return line
        before.append(line)
    raise AssertionError(f"it has ended without {part!r}: {''.join(before)}")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status of a process, and the rest of its standard error."""
    _, error = process.communicate(timeout=PATIENCE_S)
    return process.returncode, error


def post(port: int, **body: Any) -> http.client.HTTPResponse:
    """The answer to a request for a completion, or for that of a chat if there are messages."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    chats = "chat/" if "messages" in body else ""
    prompt = {} if chats else {"prompt": "import os\n"}
    client.request("POST", f"/v1/{chats}completions", json.dumps({**prompt, **body}))
    return client.getresponse()


def metrics(port: int) -> dict[str, float]:
    """The numbers of /metrics by name and label; of pools, tiers and replicas, all
    together."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    counts: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in _OF_POOLS]
            counts[".".join([sample.name.removeprefix("paged_kv:"), *labels])] += sample.value
    return dict(counts)


_OF_POOLS = ("pool", "model", "tier", "replica")
