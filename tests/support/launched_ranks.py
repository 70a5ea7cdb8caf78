"""Starts the processes of one model on this machine, as mlx.launch does with its backend "ring"."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.folders import ROOT
from tests.support.ports import free_port

# A launch computes for a few seconds, and a busy machine is several times as slow.
LAUNCH_S = 85


@contextmanager
def launched(
    folder: Path, size: int, *command: str, **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """`size` processes of a Python command, which see each other; at the end none of them runs.
    The output of rank i goes to the file `output-i` in the folder."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(size)]))
    shared = {"PAGED_KV_THREADS": "1", "PAGED_KV_PUBLISH": "0"}
    if size > 1:  # MLX would wait for a neighbour that is not there
        shared["MLX_HOSTFILE"] = str(hosts)
    processes = []
    try:
        for rank in range(size):
            with (folder / f"output-{rank}").open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        cwd=ROOT,
                        env={**os.environ, **shared, **environment, "MLX_RANK": str(rank)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def output_of(folder: Path, rank: int) -> str:
    """What a rank has written so far."""
    return (folder / f"output-{rank}").read_text()


def told(folder: Path, size: int, case: str, *arguments: str, **environment: str) -> list[Any]:
    """What each rank returns of a function of `tests/support/rank_cases.py`."""
    command = ("-m", "tests.support.rank_cases", str(folder), case, *arguments)
    with launched(folder, size, *command, **environment) as processes:
        for rank, process in enumerate(processes):
            status = process.wait(LAUNCH_S)
            assert status == 0, f"rank {rank} ended with {status}: {output_of(folder, rank)}"
    return [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(size)]
