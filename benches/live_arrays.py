"""Counts what a server holds over 10,000 requests, and what caches hold over 300,000 tokens:
python -m benches.live_arrays

On Macs a process may have 499,000 buffers, so their number must not grow with tokens or requests.

served      `paged-kv server` in a process of its own, on the embedded model in float32, answers 8
            clients. Each prompt is the beginning of one of 64 texts, of 16 to 1,500 tokens, and
            each answer has up to 24 tokens; lengths are log-uniform, and drawn from one seed. The
            idle server is looked at after so many requests: the system says what is resident, and
            /metrics what MLX holds.
generated   mlx-lm's BatchGenerator decodes batches of up to 64 sequences, of 480 tokens each, on
            its own caches and on pages. 32 sequences are added whenever at most 32 run. The count
            is taken between two steps, while sequences run.

A live array is an `mx.array` that Python's collector tracks; slabs of pages are arrays, and so are
weights. `tests.support.live_arrays` says what that counts and what it misses.
"""

import json
import math
import random
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

from benches.openblas import BLAS

# isort: split
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from benches.results_file import write_result
from paged_kv import PagedCacheFactory, embedded_model
from paged_kv.server.engine.freed_buffers import freed_buffers_limit
from tests.support.live_arrays import live_arrays
from tests.support.patience import wait_until
from tests.support.server_process import metrics, post, server_process
from tests.support.soaking import read_log

SEED = 0
REQUESTS, CLIENTS = 10_000, 8
NOTED = (100, 1_000, 2_500, 5_000, 7_500, REQUESTS)
TEXTS, PROMPT_TOKENS, ANSWER_TOKENS = 64, (16, 1_500), (1, 24)
TOKENS, ROWS, ROW_TOKENS, ROW_PROMPT = 300_000, 64, 480, 8
STEP = 2_048  # the default of --prefill-step-size
# The server evicts prefixes; the batches have room.
SERVER_BYTES, BATCH_BYTES = 64 << 20, 512 << 20

# In the server's process: at a signal, the number of arrays is written to a file.
COUNTING = """
import signal
from pathlib import Path
def count(*_):
    from tests.support.live_arrays import live_arrays
    new = Path({path!r} + ".new")
    new.write_text(str(live_arrays()))
    new.rename({path!r})
signal.signal(signal.SIGUSR1, count)
"""


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    """A whole number of this range, each of its orders of magnitude as likely as another."""
    return round(least * math.pow(most / least, rng.random()))


def questions(requests: int) -> Iterator[dict[str, Any]]:
    """The bodies of so many requests."""
    rng, vocabulary = random.Random(SEED), range(10, 4_000)
    texts = [rng.choices(vocabulary, k=PROMPT_TOKENS[1]) for _ in range(TEXTS)]
    for _ in range(requests):
        prompt = rng.choice(texts)[: log_uniform(rng, *PROMPT_TOKENS)]
        most = log_uniform(rng, *ANSWER_TOKENS)
        yield {"prompt": prompt, "max_tokens": most, "temperature": 0}


def served(requests: int) -> dict[str, Any]:
    """Ask a server, and note its meters after some of the requests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrays"
        options = ["--dtype", "float32", "--max-kv-bytes", str(SERVER_BYTES)]
        first = COUNTING.format(path=str(path))
        with server_process(*options, first=first) as (process, port), read_log(process):
            began, asked = monotonic(), questions(requests)
            noted = [
                {"requests": count} | meters(process, port, path)
                for count in asked_in_parts(port, asked, requests)
            ]
    return {"requests": requests, "seconds": monotonic() - began, "noted": noted}


def asked_in_parts(port: int, asked: Iterator[dict[str, Any]], requests: int) -> Iterator[int]:
    """Send the requests; yields their number whenever it is to be noted, with an idle server."""

    def ask(body: dict[str, Any]) -> None:
        answer = post(port, **body)
        content = answer.read()
        assert answer.status == 200, content

    done = 0
    with ThreadPoolExecutor(CLIENTS) as clients:
        for count in (each for each in NOTED if each <= requests):
            part = [next(asked) for _ in range(count - done)]
            list(clients.map(ask, part))
            done = count
            yield done


def meters(process: subprocess.Popen[str], port: int, path: Path) -> dict[str, float]:
    """What the system and the server itself say of a server that is idle."""
    wait_until(lambda: metrics(port)["kv_active_bytes"] == 0)
    path.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR1)
    wait_until(path.exists)
    told = metrics(port)
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    return {
        "resident_bytes": int(status["VmRSS"]) * 1024,
        "most_resident_bytes": int(status["VmHWM"]) * 1024,
        "arrays": int(path.read_text()),
        "mlx_active_bytes": told["mlx_active_bytes"],
        "mlx_cache_bytes": told["mlx_cache_bytes"],
        "mlx_peak_bytes": told["mlx_peak_bytes"],
        "mapped_bytes": told["kv_mapped_bytes"],
        "generated_tokens": told["generation_tokens_total"],
    }


def generated(model: Any, make_cache: Callable[[], list[Any]], tokens: int) -> dict[str, Any]:
    """Decode so many tokens; the live arrays at the start, in the middle and at the end."""
    generator = BatchGenerator(model, completion_batch_size=ROWS, prefill_batch_size=ROWS)
    rng, began = random.Random(SEED), monotonic()
    made, running, held = 0, 0, list[dict[str, int]]()
    while made < tokens:
        if running <= ROWS // 2:
            prompts = [rng.choices(range(10, 4_000), k=ROW_PROMPT) for _ in range(ROWS // 2)]
            caches = [make_cache() for _ in prompts]
            generator.insert(prompts, [ROW_TOKENS] * len(prompts), caches=caches)
            running += len(prompts)
        answers = generator.next()[1]
        made += len(answers)
        running -= sum(bool(each.finish_reason) for each in answers)
        # Not before all sequences of the first batches run.
        if made >= (ROWS * 2, tokens // 2, tokens)[min(len(held), 2)] and len(held) < 3:
            held.append({"tokens": made, "arrays": live_arrays()})
    return {"noted": held, "seconds": monotonic() - began}


def main() -> None:
    model = load(embedded_model())[0]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    weight_bytes = mx.get_active_memory()
    factory = PagedCacheFactory(model, max_bytes=BATCH_BYTES)
    figures = {
        "weight_bytes": weight_bytes,
        "step_bytes": freed_buffers_limit(model, STEP),
        "blas": BLAS,
        "clients": CLIENTS,
        "server_bytes": SERVER_BYTES,
        "weights": live_arrays(),
        "rows": ROWS,
        "generated": {
            "mlx_lm": generated(model, lambda: make_prompt_cache(model), TOKENS),
            "paged": generated(model, factory.make_cache, TOKENS),
        },
        "served": served(REQUESTS),
    }
    print(json.dumps(figures, indent=2))
    print("written to", write_result("live_arrays", figures).name)


if __name__ == "__main__":
    main()
