"""How a replica hands on what its application sends, and which replicas serve together."""

import asyncio
import shutil
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

pytest.importorskip("ray", reason="needs the extra ray")

from paged_kv.server.replicas.placement import ForwardedRequest
from paged_kv.server.replicas.replica import PIECE_BYTES, Agreement, _answered, identity_of
from tests.support.folders import MODEL_FOLDERS

pytestmark = pytest.mark.slow

REQUEST = ForwardedRequest({"type": "http", "path": "/x"}, b"a body")


def part(number: int) -> Message:
    return {"type": "http.response.body", "body": b"%d" % number, "more_body": number < 5}


def test_an_application_is_told_that_its_client_has_left() -> None:
    """It may count that, and ends the request's computation."""
    told: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(part(1))
        told.append(await receive())

    async def run() -> None:
        answers = _answered(app, REQUEST)
        await anext(answers)
        assert not told
        await answers.aclose()  # type: ignore[attr-defined]  # a generator

    asyncio.run(run())
    assert told == [{"type": "http.disconnect"}]


def test_an_application_that_fails_ends_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(part(1))
        raise ZeroDivisionError

    async def run() -> list[list[Message]]:
        return [messages async for messages in _answered(app, REQUEST)]

    assert asyncio.run(run()) == [[part(1)]]
    assert "ZeroDivisionError" in caplog.text


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_FOLDERS["stdlib-llama"], tmp_path / "copy"))


def test_the_same_files_elsewhere_are_the_same_model(copy: Path) -> None:
    agreement = Agreement()
    agreement.require_same("first", identity_of(MODEL_FOLDERS["stdlib-llama"]))
    (copy / ".cache").mkdir()
    (copy / ".lock").touch()
    agreement.require_same("second", identity_of(copy))


def test_other_weights_are_refused_by_name(copy: Path) -> None:
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-PIECE_BYTES:] = bytes(PIECE_BYTES)
    weights.write_bytes(content)
    agreement = Agreement()
    agreement.require_same("first", identity_of(MODEL_FOLDERS["stdlib-llama"]))
    with pytest.raises(ValueError, match=r"replica second has model .* replica first.* has"):
        agreement.require_same("second", identity_of(copy))


def test_an_empty_file_counts_too(copy: Path) -> None:
    before = identity_of(copy)
    (copy / "added.json").touch()
    assert identity_of(copy) != before


def test_other_versions_are_refused_by_name() -> None:
    agreement = Agreement()
    agreement.require_same("first", identity_of(None))
    agreement.require_same("second", identity_of(None))
    with pytest.raises(ValueError, match=r"replica third has mlx 0\.0\.1, and replica first"):
        agreement.require_same("third", identity_of(None) | {"mlx": "0.0.1"})
