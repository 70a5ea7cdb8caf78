"""`paged-kv server` on several processes of this machine."""

import json
import random
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paged_kv import embedded_model
from tests.support.launched_ranks import LAUNCH_S, launched, output_of
from tests.support.patience import wait_until
from tests.support.ports import free_port
from tests.support.running_server import FEW_LIKELY, in_float32, paged_server
from tests.support.server_process import metrics, post

pytestmark = pytest.mark.slow

# 7 blocks of 6 layers on rank 1; rank 0 would have 80.
BUDGETS = "64MB,6MB"
LONG = "def read_file(path):\n    return open(path).read()\n\n" * 40


@contextmanager
def served(folder: Path, *options: str, **environment: str) -> Iterator[tuple[int, Any]]:
    """The port of a server on two processes, and these."""
    port = free_port()
    common = ("--model", embedded_model(), "--port", str(port), "--log-level", "INFO")
    command = ("-m", "tests.support.rank_cases", str(folder), "serve", BUDGETS, *common, *options)
    with launched(folder, 2, *command, **environment) as processes:

        def is_ready() -> bool:
            assert [each.poll() for each in processes] == [None, None], output_of(folder, 0)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                    return True
            except urllib.error.URLError:
                return False

        wait_until(is_ready)
        yield port, processes


def asked(port: int, prompt: str, **options: Any) -> Any:
    """The answer to a completion: its text and cached tokens, or the status of an error."""
    response = post(port, **{"prompt": prompt, "max_tokens": 8, "temperature": 0, **options})
    answer = json.load(response)
    if response.status != 200:
        return response.status, answer["error"]["message"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [choice["text"] for choice in answer["choices"]], cached


def streamed(port: int, prompt: str, chunks: int | None = None) -> str:
    """The text of a stream, or of its first chunks: then the client leaves."""
    text = ""
    with post(port, prompt=prompt, max_tokens=40, temperature=0, stream=True) as response:
        for line in response:
            if line.startswith(b"data: {"):
                text += str(json.loads(line[6:])["choices"][0]["text"])
                chunks = None if chunks is None else chunks - 1
                if chunks == 0:
                    return text
    return text


def history(seed: int) -> list[str]:
    """Prompts that begin alike, and end differently."""
    chosen = random.Random(seed)
    return [LONG[: chosen.randrange(20, len(LONG))] + "#" * chosen.randrange(9) for _ in range(12)]


def answers(port: int) -> list[Any]:
    """What a server answers to requests one by one, at once, streamed, salted and left."""
    one_by_one = [
        asked(port, prompt) for prompt in ("import os\n", LONG, LONG + "x", "import os\n")
    ]
    salted = [asked(port, LONG, cache_salt=salt)[1] for salt in ("a", "b", "a")]
    with ThreadPoolExecutor(4) as threads:
        # Which of them hits whose prefix depends on time; the texts do not.
        at_once = [texts for texts, _ in threads.map(lambda each: asked(port, each), history(1))]
        left = threads.submit(streamed, port, "class Left:\n", 3)
        several = asked(port, "import re\n", n=3)[0]
        seeded = asked(port, "import re\n", temperature=1, seed=3, **FEW_LIKELY)[0]
        text = streamed(port, "def read(path):\n")
        assert text.startswith(streamed(port, "def read(path):\n", 5))
        left.result()
    return [one_by_one, salted, at_once, several, seeded, text]


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], ["--draft-model", "ngram"]])
def test_ranks_answer_as_one_process_with_unequal_budgets(
    options: list[str], tmp_path: Path
) -> None:
    with in_float32(), paged_server("--model", embedded_model()) as running:
        expected = answers(running.port)
    with served(tmp_path, *options) as (port, processes):
        assert answers(port) == expected
        # The memory of the rank that has more holds it.
        status, message = asked(port, LONG * 3, max_tokens=4000)
        assert status == 400, message
        assert "tokens were asked" in message
        counted = metrics(port)
        assert [counted[f"rank_bytes.{rank}.budget"] for rank in range(2)] == [6_000_000] * 2
        processes[1].send_signal(signal.SIGTERM)  # Rank 0 decides when to end.
        processes[0].send_signal(signal.SIGTERM)
        statuses = [process.wait(LAUNCH_S) for process in processes]
        assert statuses == [0, 0], output_of(tmp_path, 0) + output_of(tmp_path, 1)
    assert expected[0][2][1] > 256
    assert expected[1][:2] == [0, 0]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_hangs_ends_the_other_with_its_name(tmp_path: Path, name: str) -> None:
    with (
        served(tmp_path, PAGED_KV_RANK_TIMEOUT="3") as (port, processes),
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(streamed, port, "def read(path):\n", None)
        wait_until(lambda: "begins" in output_of(tmp_path, 1))
        processes[1].send_signal(signal.Signals[name])
        assert processes[0].wait(LAUNCH_S) == 75, output_of(tmp_path, 0)
        assert answer.exception() is not None or answer.result() is not None
    assert "paged-kv: rank 0 ends: rank 1 has" in output_of(tmp_path, 0)


def test_every_rank_follows_the_grammar_of_an_answer(tmp_path: Path) -> None:
    outputs = {"structured_outputs": {"regex": "(yes|no), [0-9]{3}!"}}
    with served(tmp_path, "--chat-template", "{{ messages[0].content }}") as (port, _):
        kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 2, "n": 3}]
        for options in kinds:
            texts, _ = asked(port, "import os\n", max_tokens=40, **outputs, **options)
            for text in texts:
                assert re.fullmatch("(yes|no), [0-9]{3}!", text)
        status, message = asked(port, "import os\n", structured_outputs={"regex": "(a"})
        assert status == 400
        assert "structured_outputs" in message
        assert asked(port, "import os\n")[0]
        for _ in range(2):  # no rank prepares the next turn of the first chat
            messages = [{"role": "user", "content": "import os"}]
            assert post(port, messages=messages, max_tokens=2).status == 200
