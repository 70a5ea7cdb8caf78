"""The arguments of the application: what is wrong with them is said before anything starts."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from paged_kv.server.replicas.deployments import app, server_options
from tests.support.folders import MODEL_FOLDERS

pytestmark = pytest.mark.slow

MODEL = str(MODEL_FOLDERS["stdlib-llama"])


def test_paths_are_full_as_replicas_start_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(MODEL)
    (tmp_path / "keys").write_text("secret\n")
    options = server_options(
        {"model": "model", "api_key": "keys", "store": "pages", "model_alias": "other=model"}
        | {"read_tokens": "1024", "offload": "cold"}
    )
    assert options.model == str(tmp_path / "model")
    assert options.api_key == str(tmp_path / "keys")
    assert options.cache.store == [tmp_path / "pages"]
    assert options.cache.offload == tmp_path / "cold"
    assert options.model_alias == [("other", str(tmp_path / "model"))]


@pytest.mark.parametrize("value", [True, "true"])
def test_an_option_that_needs_no_value_may_have_none(value: Any) -> None:
    assert server_options({"model": MODEL, "store": value}).cache.store


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to serve"),
        ({"model": "/missing"}, "there is no folder '/missing'"),
        ({"model": MODEL, "max_kv_bytes": "1KB"}, "gives pages 1.00 kB"),
        ({"model": MODEL, "drop_tools": "maybe"}, "drop_tools=maybe is neither true nor false"),
        ({"model": MODEL, "max_tokens": "many"}, "max.tokens.*many"),
        ({"model": MODEL, "num_replica": 2}, "no option 'num_replica': there are num_replicas"),
        ({"model": MODEL, "port": 8080}, "port has no meaning behind Ray Serve.*http_options"),
        ({"model": MODEL, "num_replicas": 0}, "num_replicas=0 is not a number from 1 on"),
        ({"model": MODEL, "num_replicas": "few"}, "num_replicas=few"),
        ({"model": MODEL, "num_cpus": -1}, "num_cpus=-1 is not a number from 0 on"),
        ({"model": MODEL, "num_gpus": "nan"}, "num_gpus=nan"),
        ({"model": MODEL, "ranks": 1.5}, "ranks=1.5 is not a number from 1 on"),
        ({"model": MODEL, "ranks": 2, "num_cpus": 0}, "ranks need num_cpus or num_gpus"),
        ({"model": MODEL, "ranks": 2, "adapter_path": MODEL}, "--adapter-path does not work"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        app(arguments)


def test_replicas_are_placed_by_what_they_need() -> None:
    application = app({"model": MODEL, "num_replicas": "3", "num_cpus": "2", "max_connections": 9})
    (replicas,) = application._bound_deployment.init_args[:1]
    deployment = replicas._bound_deployment
    assert deployment.num_replicas == 3
    assert deployment.ray_actor_options["num_cpus"] == 2
    assert deployment.max_ongoing_requests == 9
