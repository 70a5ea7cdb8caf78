"""lm-eval's `local-completions` gets from the server what MLX computes itself.

It needs libraries of 0.9 GB: `PAGED_KV_LM_EVAL` names a Python that has it, as `.ci/check_lm_eval`
installs it. Without it tests/server/completions/test_prompt_logprobs.py sends requests of the same
form.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from tests.support.folders import MODEL_FOLDERS, ROOT
from tests.support.patience import PATIENCE_S
from tests.support.server_process import server_process

MODEL = str(MODEL_FOLDERS["stdlib-llama"])
TASKS = ROOT / "tests" / "support" / "lm_eval"
PYTHON = os.environ.get("PAGED_KV_LM_EVAL")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(PYTHON is None, reason="PAGED_KV_LM_EVAL names no Python with lm-eval"),
]


def evaluated(port: int, folder: Path) -> list[Any]:
    """The samples that lm-eval writes down: each has its texts, and what the server said."""
    assert PYTHON is not None
    server = f"base_url=http://127.0.0.1:{port}/v1/completions,num_concurrent=2"
    model = f"model=default_model,tokenizer={MODEL},tokenizer_backend=huggingface"
    command = [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--batch_size", "4"]
    command += ["--model_args", f"{model},{server}", "--include_path", ".", "--log_samples"]
    command += ["--tasks", "ten_questions", "--output_path", str(folder)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        command,
        cwd=TASKS,
        env=kept | offline,
        capture_output=True,
        text=True,
        timeout=20 * PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    (samples,) = folder.glob("*/samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def computed(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether the model would write it. Its tokens are
    those that lm-eval takes: of the whole text, behind as many as the context has without spaces at
    its end."""
    begun = tokenizer.encode(context.rstrip())
    before = len(begun)
    tokens = [*begun, *tokenizer.encode(context + continuation)[before:]]
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    places = range(before, len(tokens))
    likeliest: Any = mx.argmax(logprobs, axis=-1).tolist()
    likelihood = sum(logprobs[at - 1, tokens[at]].item() for at in places)
    return likelihood, all(likeliest[at - 1] == tokens[at] for at in places)


def test_lm_eval_finds_the_likelihoods_that_mlx_computes(tmp_path: Path) -> None:
    with server_process("--dtype", "float32") as (_, port):
        samples = evaluated(port, tmp_path)
    model, tokenizer, *_ = mlx_lm.load(MODEL)
    model.set_dtype(mx.float32)
    assert len(samples) == 10
    for sample in samples:
        for asked, (said,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            likelihood, is_greedy = computed(model, tokenizer, asked["arg_0"], asked["arg_1"])
            assert float(said[0]) == pytest.approx(likelihood, abs=1e-3)
            assert said[1] == str(is_greedy)
    assert sum(sample["acc"] for sample in samples) == 9
