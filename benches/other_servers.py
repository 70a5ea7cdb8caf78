"""Loads the servers that others made, as they are and with pages: python -m benches.other_servers

    python -m benches.other_servers --install     fetches Rapid-MLX and vllm-mlx from PyPI
    python -m benches.other_servers [NAME ...]    measures these servers, or all, for
                                                  docs/other-servers.md

Each server is a process of its own, on SmolLM2 in float32 and on loopback: once as it is, and once
started by `paged-kv run`. Both take turns, one of them at a time, and answer the same requests:

    mixed       24 requests of 8 clients, as in benches/serving_http.py, without a common beginning
    prefix      8 clients behind the same 1,000 tokens
    turns       one client whose conversation has 6 turns

Figures are those of benches/serving_http.py; peak memory is the most that the process had resident.

Rapid-MLX and vllm-mlx go without their dependencies into folders beside the real models: they
cannot be installed together, and ask for packages of gigabytes that text does not need.
"""

from benches.openblas import BLAS

import argparse
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

# isort: split
from mlx_lm.utils import load_tokenizer

from benches.real_models.folders import cache_folder
from benches.results_file import latest_figures, write_result
from benches.serving_http import (
    Load,
    Request,
    answering,
    figures_of,
    make_requests,
    run,
    write_float32,
)
from tests.support.ports import free_port

REPETITIONS = 2
CLIENTS = 8
REQUESTS = 24
PREFIX_TOKENS = 1_000
TURNS = 6
NEW_TOKENS = 32
POOL_BYTES = "2GB"


class Server(NamedTuple):
    """A server that somebody else made.

    Attributes:
        packages: what it needs besides what CI installs.
        module: that runs it.
        options: before and behind the model.
    """

    packages: tuple[str, ...]
    module: str
    options: tuple[Sequence[str], Sequence[str]]


_HTTPX = ("httpx==0.28.1", "httpcore==1.0.9", "certifi", "idna", "h11", "anyio")
SERVERS = {
    "mlx_lm": Server((), "mlx_lm.server", (["--model"], ["--log-level", "ERROR"])),
    "rapid-mlx": Server(
        ("rapid-mlx==0.16.10", "python-multipart", *_HTTPX), "rapid_mlx.cli", (["serve"], [])
    ),
    "vllm-mlx": Server(
        ("vllm-mlx==0.6.0", "python-multipart"),
        "vllm_mlx.cli",
        (["serve"], ["--continuous-batching"]),
    ),
}


def folder_of(name: str) -> Path:
    """Where the packages of a server are, or would be."""
    return cache_folder() / "servers" / name


def is_installed(name: str) -> bool:
    """Whether `install` has fetched a server, with the versions named here."""
    packages = SERVERS[name].packages
    stamp = folder_of(name) / "installed"
    return not packages or (stamp.is_file() and stamp.read_text() == " ".join(packages))


def install(name: str) -> None:
    """Fetch a server, unless it is there."""
    if is_installed(name):
        return
    folder, packages = folder_of(name), SERVERS[name].packages
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder)]
    subprocess.run([*command, *packages], check=True)
    (folder / "installed").write_text(" ".join(packages))


class Running(NamedTuple):
    """A server that answers, and the model's name in its requests."""

    port: int
    model: str
    process: subprocess.Popen[bytes]

    def peak_bytes(self) -> int:
        """The most memory that it had resident; 0 where the system does not say."""
        status = Path(f"/proc/{self.process.pid}/status")
        found = re.search(r"VmHWM:\s+(\d+)", status.read_text() if status.is_file() else "")
        return 1024 * int(found[1]) if found else 0


@contextmanager
def serving(name: str, model: Path, port: int, pages: Sequence[str] | None) -> Iterator[Running]:
    """A server in a process of its own, once it answers.

    Args:
        name: of the server.
        model: the folder of the model that it serves.
        port: that it listens at.
        pages: options of `paged-kv run`; None for the server as it is.

    Raises:
        RuntimeError: it does not answer.
    """
    known = SERVERS[name]
    before, behind = known.options
    words = [*before, str(model), "--host", "127.0.0.1", "--port", str(port), *behind]
    if pages is None:
        # Both multiply with the same library.
        program = f"runpy.run_module({known.module!r}, None, '__main__', True)"
        start = ["-c", f"import benches.openblas, runpy; {program}"]
    else:
        start = ["-m", "paged_kv", "run", *pages, "--", "-m", known.module]
    quiet = {"DO_NOT_TRACK": "1", "RAPID_MLX_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    asked_for = "default_model" if name == "mlx_lm" else str(model)
    command, packages = [*start, *words], str(folder_of(name))
    with answering(port, asked_for, command, PYTHONPATH=packages, **quiet) as process:
        yield Running(port, asked_for, process)


def loads_of(tokenizer: Any, model: str, repetition: int) -> dict[str, tuple[list[Request], int]]:
    """The requests of one run by the name of the load, and how many clients send them."""
    drawn = [replace(each, model=model) for each in make_requests(tokenizer, repetition)]
    texts = [each.prompt for each in drawn[:REQUESTS]]
    common = tokenizer.decode(tokenizer.encode("".join(texts))[:PREFIX_TOKENS])
    behind = [Request(common + each[:200], NEW_TOKENS, model) for each in texts[:CLIENTS]]
    said = [each[:600] for each in texts[:TURNS]]
    turns = ["".join(said[: turn + 1]) for turn in range(TURNS)]
    return {
        "mixed": (drawn[:REQUESTS], CLIENTS),
        "prefix": (behind, CLIENTS),
        "turns": ([Request(each, NEW_TOKENS, model) for each in turns], 1),
    }


def measure(name: str, model: Path) -> dict[str, Any]:
    """The figures of one server, as it is and with pages."""
    tokenizer = load_tokenizer(model)
    ways = {"stock": None, "paged": ["--max-kv-bytes", POOL_BYTES]}
    loads: dict[str, dict[str, Load]] = {way: defaultdict(Load) for way in ways}
    peaks = dict.fromkeys(ways, 0)
    for repetition in range(REPETITIONS):
        for way, pages in ways.items():
            with serving(name, model, free_port(), pages) as server:
                of_run = loads_of(tokenizer, server.model, repetition)
                for load, (requests, clients) in of_run.items():
                    run(server.port, requests, loads[way][load], clients)
                    seconds = loads[way][load].seconds[-1]
                    print(f"{name}, {way}, {load}: {seconds:.1f} s", file=sys.stderr)
                peaks[way] = max(peaks[way], server.peak_bytes())
    figures: dict[str, Any] = {"peak_bytes": peaks}
    for load in loads["stock"]:
        figures[load] = figures_of({way: loads[way][load] for way in ways})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.other_servers", description="Measures servers of others."
    )
    parser.add_argument("--install", action="store_true", help="fetch them, and measure nothing")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SERVERS)}")
    arguments = parser.parse_args()
    names = arguments.names or list(SERVERS)
    for name in names:
        install(name)
    if arguments.install:
        return
    with tempfile.TemporaryDirectory() as folder:
        write_float32(Path(folder))
        measured = {name: measure(name, Path(folder)) for name in names}
    facts = {"model": "smollm2", "dtype": "float32", "blas": BLAS, "repetitions": REPETITIONS}
    figures = latest_figures("other_servers") | facts | measured
    print("written to", write_result("other_servers", figures).name)


if __name__ == "__main__":
    main()
