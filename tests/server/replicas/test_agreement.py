"""Replicas that would answer differently do not serve together."""

import shutil
from pathlib import Path

import pytest

from paged_kv.server.replicas.agreement import PIECE_BYTES, Agreement, identity_of
from tests.support.folders import MODEL_FOLDERS


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
