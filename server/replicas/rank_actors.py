"""Starts the processes that share the model of one replica, each in a bundle of its placement
group, as mlx.launch would."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paged_kv.integrations.distributed.connected_ranks import joined_ranks
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.lifecycle import follow
from paged_kv.server.options import ServerOptions
from paged_kv.server.server_command import prepare_process


class Rank:
    """Another rank than the first: an actor of Ray. It ends with the first."""

    def address(self) -> str:
        """Where it can listen."""
        return free_address()

    def follow(self, rank: int, addresses: list[str], options: ServerOptions) -> int:
        """Compute what rank 0 decides, until it ends; returns the exit status."""
        prepare_process(options)
        _join(rank, addresses)
        return follow(PagedModelProvider(options))


async def start_ranks(options: ServerOptions) -> list[Any]:
    """Start the other ranks of this replica, one in each other bundle of its placement group, and
    make this process rank 0. Returns their actors; none if the replica is alone."""
    group = get_current_placement_group()
    if group is None:
        return []
    actors = [
        ray.remote(Rank)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        )
        .remote()
        for number, bundle in enumerate(group.bundle_specs)
        if number
    ]
    others = await asyncio.gather(*[actor.address.remote() for actor in actors])
    addresses = [free_address(), *others]
    for rank, actor in enumerate(actors, start=1):
        actor.follow.remote(rank, addresses, options)
    _join(0, addresses)
    return actors


def free_address() -> str:
    """The address of this machine in the cluster, and a port that is free there."""
    host = get_node_ip_address()
    with socket.create_server((host, 0)) as listening:
        return f"{host}:{listening.getsockname()[1]}"


def _join(rank: int, addresses: list[str]) -> None:
    """Meet the other ranks, told of them as mlx.launch tells processes for the backend ring."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as hosts:
        json.dump([[each] for each in addresses], hosts)
        hosts.flush()
        os.environ |= {"MLX_HOSTFILE": hosts.name, "MLX_RANK": str(rank)}
        joined_ranks()
