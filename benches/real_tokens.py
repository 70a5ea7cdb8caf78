"""Greedy tokens of real models in 16 bits: python -m benches.real_tokens

Sums in 16 bits that run in another order can let another token win where two are close. So tokens
on pages are compared with mlx-lm's, and mlx-lm's batch with mlx-lm's single runs. Each prompt is a
piece of a file of this checkout. A row has, for one model and one side:

    prompts, tokens       how many were compared, up to the first token that differs in each
    prompts_that_differ   in which a token differs
    largest_gap           at such a token, the log probability by which the single run preferred its
                          own token to the other one

Models run in two processes, as nothing here is a time.
"""

from benches.openblas import BLAS

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from benches.real_models.folders import MODELS, model_folder
from benches.results_file import write_result
from benches.two_processes import finished
from paged_kv import PagedCacheFactory

ROOT = Path(__file__).parent.parent
FILES = ("README.md", "docs/architecture.md", "integrations/paged_cache_factory.py", "setup.py")
# A CPU takes minutes for a thousand tokens in 16 bits.
LENGTHS = (40, 90)
NEW_TOKENS = 32

Run = list[tuple[int, mx.array]]


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """Pieces of different lengths of each file."""
    prompts = []
    for path in FILES:
        tokens = tokenizer.encode((ROOT / path).read_text(encoding="utf-8"))
        prompts += [tokens[100 * number :][:length] for number, length in enumerate(LENGTHS)]
    return prompts


def alone(model: Any, prompt: list[int], cache: list[Any]) -> Run:
    """The tokens of one prompt, each with the log probabilities it was chosen by."""
    steps: Any = generate_step(mx.array(prompt), model, max_tokens=NEW_TOKENS, prompt_cache=cache)
    return [(int(token), logprobs.astype(mx.float32)) for token, logprobs in steps]


def batched(model: Any, prompts: list[list[int]]) -> list[Run]:
    """The same of all prompts at once."""
    generator: Any = BatchGenerator(model, max_tokens=NEW_TOKENS, completion_batch_size=8)
    uids = generator.insert(prompts)
    runs: dict[int, Run] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            logprobs = response.logprobs.astype(mx.float32)
            runs[response.uid].append((response.token, logprobs))
    return [runs[uid] for uid in uids]


def compared(runs: list[Run], singles: list[Run]) -> dict[str, Any]:
    """How far runs are those of mlx-lm alone."""
    tokens, gaps = 0, []
    for run, single in zip(runs, singles, strict=True):
        for (token, _), (expected, logprobs) in zip(run, single, strict=False):
            tokens += 1
            if token != expected:
                gaps.append(float(logprobs[expected] - logprobs[token]))
                break
    return {
        "prompts": len(runs),
        "tokens": tokens,
        "prompts_that_differ": len(gaps),
        "largest_gap": max(gaps, default=0.0),
    }


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of one model."""
    model, tokenizer = load(str(model_folder(name)))[:2]
    prompts = prompts_of(tokenizer)
    singles = [alone(model, prompt, make_prompt_cache(model)) for prompt in prompts]
    factory = PagedCacheFactory(model, max_bytes="1GB")
    sides = {"pages, alone": [alone(model, each, factory.make_cache()) for each in prompts]}
    with factory:
        sides["pages, batch"] = batched(model, prompts)
    sides["mlx-lm, batch"] = batched(model, prompts)
    dtype = str(next(iter(model.layers)).self_attn.q_proj.weight.dtype)
    about = {"model": name, "dtype": dtype.removeprefix("mlx.core.")}
    return [about | {"side": side} | compared(runs, singles) for side, runs in sides.items()]


def main() -> None:
    of_models = dict(finished(rows_of, [(name,) for name in MODELS]))
    rows = [row for name in MODELS for row in of_models[name,]]
    for row in rows:
        print(row)
    write_result("real_tokens", {"blas": BLAS, "rows": rows})


if __name__ == "__main__":
    main()
