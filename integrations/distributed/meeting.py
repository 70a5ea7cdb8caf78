"""Connects the ranks that mlx.launch has started.

Rank 0 listens, and tells the others where, and a key, in an array that MLX's collectives carry.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from functools import cache
from pathlib import Path
from typing import cast

import mlx.core as mx

from paged_kv.integrations.distributed.connected_ranks import ConnectedRanks
from paged_kv.integrations.distributed.connections import (
    MOST_NEWCOMERS,
    Accepted,
    Meeting,
    accept,
    connect,
)
from paged_kv.integrations.distributed.watch import Watch
from paged_kv.ranks import ALONE, Ranks

# A prompt of many thousand tokens is computed in steps, none of which takes so long.
DEFAULT_TIMEOUT_S = 300.0

# All ranks are past MLX's own meeting when this one begins.
MEETING_S = 60.0


@cache
def joined_ranks() -> Ranks:
    """The processes that mlx.launch has started, or `ALONE`. All of them call this, which connects
    them at the first time.

    Raises:
        NotConnected: they cannot reach each other.
        ValueError: PAGED_KV_RANK_TIMEOUT is not a positive number of seconds.
    """
    group = mx.distributed.init()
    if group.size() == 1:
        return ALONE
    timeout_s = _timeout_s()
    rank, size = group.rank(), group.size()
    # Questions wait for answers, and the watch must not wait for them.
    questions, beats = _connected(rank, size), _connected(rank, size)
    return ConnectedRanks(rank, size, questions, Watch(rank, beats, timeout_s))


def _connected(rank: int, size: int) -> Accepted:
    """On rank 0 a connection to each other rank, elsewhere one to rank 0."""
    if rank != 0:
        return {0: connect(_shared(None), rank)}
    with socket.create_server(("", 0), backlog=MOST_NEWCOMERS) as listening:
        port = listening.getsockname()[1]
        meeting = _shared(Meeting(_hosts(), port, secrets.token_bytes(32)))
        return accept(listening, meeting.key, range(1, size), MEETING_S)


def _shared(meeting: Meeting | None) -> Meeting:
    """Rank 0's meeting, on every rank."""
    data = b"" if meeting is None else _packed(meeting)
    length = cast("int", mx.distributed.all_sum(mx.array(len(data))).item())
    mine = mx.array(list(data) or [0] * length, dtype=mx.uint8)
    content = json.loads(bytes(mx.distributed.all_sum(mine).tolist()))  # type: ignore[arg-type]
    return Meeting(content["hosts"], content["port"], bytes.fromhex(content["key"]))


def _packed(meeting: Meeting) -> bytes:
    content = {"hosts": meeting.hosts, "port": meeting.port, "key": meeting.key.hex()}
    return json.dumps(content).encode()


def _hosts() -> list[str]:
    """The addresses of this machine, the likeliest first: the one that MLX was given, its name."""
    named = os.environ.get("PAGED_KV_RANK_HOST")
    if named:
        return [named]
    return list(dict.fromkeys([*_hosts_of_mlx(), socket.gethostname(), "127.0.0.1"]))


def _hosts_of_mlx() -> list[str]:
    """Rank 0's addresses in what mlx.launch gives the backends ring, JACCL and NCCL."""
    found = []
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        found += [str(each) for each in json.loads(Path(hostfile).read_text("utf-8"))[0]]
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        found.append(coordinator)
    hosts = [each.rpartition(":")[0] or each for each in found]
    return [*hosts, *filter(None, [os.environ.get("NCCL_HOST_IP")])]


def _timeout_s() -> float:
    text = os.environ.get("PAGED_KV_RANK_TIMEOUT", str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"PAGED_KV_RANK_TIMEOUT must be a positive number of seconds, got {text!r}"
        )
    return seconds
