"""Makes the application that Ray Serve deploys: a front, replicas behind it, and an agreement."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, cast

from ray import serve
from ray.serve.config import RequestRouterConfig

from paged_kv.options import parsed_options
from paged_kv.server.lifecycle import LAST_S
from paged_kv.server.options import SERVER_OPTIONS, ServerOptions, server_parser
from paged_kv.server.replicas.front import Front, PrefixRouter
from paged_kv.server.replicas.replica import Agreement, Replica
from paged_kv.server.server_command import require_servable, require_servable_by

# Those of Ray Serve, and what they are when nothing is said.
OWN: dict[str, Any] = {"num_replicas": 1, "ranks": 1, "num_cpus": 1, "num_gpus": 0}

# Ray Serve listens in the place of the server.
WITHOUT_MEANING = {
    "host": "http_options in Serve's config file",
    "port": "http_options in Serve's config file",
    "header_timeout": "Serve's proxy reads headers",
    "write_timeout": "Serve's proxy writes answers",
}

# The front computes nothing: it may have as many requests as there are connections.
MOST_FORWARDED = 10_000


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application: `serve run paged_kv.ray:app model=MODEL num_replicas=4 max_kv_bytes=8GB`.

    Args:
        arguments: options of `paged-kv server` without their dashes, with underscores; and
            `num_replicas`, a number or "auto"; `ranks`, the processes that share the model of one
            replica; `num_cpus` and `num_gpus` of each process. Values may be texts, as on a command
            line, or what YAML makes of them.

    Raises:
        ValueError, OSError: one is wrong; nothing is deployed.
    """
    own = {name: arguments.get(name, usual) for name, usual in OWN.items()}
    options = server_options({k: v for k, v in arguments.items() if k not in OWN})
    ranks = _count("ranks", own["ranks"])
    require_servable_by(options, ranks)
    resources = {name: _amount(name, own[name]) for name in ("num_cpus", "num_gpus")}
    replicas = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=own["num_replicas"]
        if own["num_replicas"] == "auto"
        else _count("num_replicas", own["num_replicas"]),
        ray_actor_options=resources,
        **_shared(ranks, resources),
        max_ongoing_requests=options.max_connections,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        # A model that cannot be loaded is an error, and not one to repeat.
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=options.shutdown_timeout + LAST_S,
    )
    light = {"ray_actor_options": {"num_cpus": 0}}
    front = serve.deployment(
        serve.ingress()(Front), name="Front", max_ongoing_requests=MOST_FORWARDED, **light
    )
    agreement = serve.deployment(Agreement, name="Agreement", **light)
    application: serve.Application = front.bind(replicas.bind(options, agreement.bind()), options)
    return application


def server_options(arguments: Mapping[str, Any]) -> ServerOptions:
    """The checked options of each replica, with full paths: Ray starts replicas in other folders.
    Raises ValueError or OSError."""
    for name, instead in WITHOUT_MEANING.items():
        if name in arguments:
            raise ValueError(f"{name} has no meaning behind Ray Serve: leave it out ({instead})")
    parser = server_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # the usual one ends the process
    given = parser.parse_args(list(_words(parser, arguments)))
    options = parsed_options(given, SERVER_OPTIONS)
    require_servable(options)
    names = ("model", "draft_model", "adapter_path", "api_key", "prefill_key")
    places: dict[str, Any] = {name: _full(getattr(options, name)) for name in names}
    cache, folders = options.cache, cast("list[Any] | None", options.cache.store)
    store = folders and [_full(place) for place in folders]
    secret = replace(cache.store_options, secret=_full(cache.store_options.secret))
    cache = replace(cache, store=store, store_options=secret, offload=_full(cache.offload))
    places["model_alias"] = [(name, _full(model)) for name, model in options.model_alias]
    return replace(options, cache=cache, **places)


def _words(parser: argparse.ArgumentParser, arguments: Mapping[str, Any]) -> Iterator[str]:
    """The arguments as they stand on a command line."""
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    for name, value in arguments.items():
        if name not in actions:
            near = ", ".join(get_close_matches(name, [*OWN, *actions])) or "num_replicas, model"
            raise ValueError(
                f"there is no option {name!r}: there are {near} and those that `paged-kv server "
                "--help` lists, with underscores"
            )
        action = actions[name]
        option = action.option_strings[-1]
        if action.nargs == 0:
            if _is_true(name, value):
                yield option
        elif isinstance(value, list) or action.nargs in ("*", "+"):
            yield from (option, *map(str, value if isinstance(value, list) else value.split()))
        elif action.nargs == "?" and str(value).lower() == "true":
            yield option
        else:
            yield f"{option}={value}"


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"{message}: `paged-kv server --help` lists the options")


def _is_true(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError(f"{name}={value} is neither true nor false")
    return text == "true"


def _shared(ranks: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """How Ray Serve places replicas whose model several processes share."""
    if ranks == 1:
        return {}
    bundle = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    if not bundle:
        raise ValueError("ranks need num_cpus or num_gpus, by which Ray Serve places them")
    # A machine has one GPU for MLX, mostly.
    return {"placement_group_bundles": [bundle] * ranks, "placement_group_strategy": "SPREAD"}


def _count(name: str, value: Any) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={value} is not a number from 1 on")
    return int(text)


def _amount(name: str, value: Any) -> float:
    try:
        amount = float(value)
    except (TypeError, ValueError):
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise ValueError(f"{name}={value} is not a number from 0 on")
    return amount


def _full(place: Any) -> Any:
    """The full path of what is a file or folder here; others are names or addresses."""
    if isinstance(place, Path):
        return place.absolute()
    if isinstance(place, str) and Path(place).expanduser().exists():
        return str(Path(place).expanduser().absolute())
    return place
