"""Asks a server for the second turn of chats, some time after the first:
python -m benches.next_turns [--count]

Two servers on loopback, one with `--prepare-next off`, one with its default, take turns: SmolLM2 in
float32, and a random hybrid, Qwen3-Next with small layers. A chat asks for 400 tokens behind some
lines of Python's standard library, waits until the next turn is prepared (or would be), and asks
again with one sentence more. Its answers end by length alone. The chat templates write an answer

    kept        as the model wrote it
    shortened   without its first half, as others leave thoughts out
    rewritten   as a JSON string, as others write calls

    message     tokens of the sentence and of the headers around it, as the template writes them
    computed    tokens of the second prompt that were not cached
    first       seconds from sending the second request to the first text of its answer
    busy        tokens a second of 4 clients with chats of several short turns, one right behind the
                other: nothing can be prepared for long; a median of ratios of runs

`--count` measures no time: it runs each chat once, and leaves `first` and `busy` out.
"""

from benches.openblas import BLAS

import http.client
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from benches.results_file import write_result
from benches.serving_http import MODEL, events, server, write_float32

# isort: split
from mlx_lm.utils import load_tokenizer

from benches.models import source_tokens
from tests.support.tiny_model import tiny_folder

HYBRID = "random hybrid"
HYBRID_LAYERS = {"num_hidden_layers": 8, "hidden_size": 256, "max_position_embeddings": 8192}
QUESTION_TOKENS, ANSWER_TOKENS, CHATS = 300, 400, 3
SENTENCE = "Now tell me, in a few words only, what is the most important part of that, and why."
SIDES = {"off": ["--prepare-next", "off"], "on": []}
CLIENTS, TURNS, TURN_TOKENS, BUSY_RUNS = 4, 4, 32, 3
# No server takes longer to prepare a turn, or to find out that there is nothing to prepare.
PATIENCE_S = 60.0

_TEMPLATE = (
    "{% for each in messages %}<|im_start|>{{ each.role }}\n"
    "{% if each.role == 'assistant' %}{{ ANSWER }}{% else %}{{ each.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "kept": "each.content",
    "shortened": "each.content[(each.content | length) // 2:]",
    "rewritten": "each.content | tojson",
}


class Turn(NamedTuple):
    """An answer: its text, the tokens of its prompt that were computed, and the seconds to its
    first text."""

    text: str
    computed: int
    first: float


def ask(port: int, messages: list[Any], most: int) -> Turn:
    """The next turn of a chat, streamed."""
    body = {"messages": messages, "max_tokens": most, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, first, computed, began = "", 0.0, 0, perf_counter()
    for event in events(port, body, "/v1/chat/completions"):
        if event["choices"] and (new := event["choices"][0]["delta"].get("content")):
            text, first = text + new, first or perf_counter() - began
        if usage := event.get("usage"):
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            computed = usage["prompt_tokens"] - cached
    return Turn(text, computed, first)


def prepared_tokens(port: int) -> int:
    """How many tokens a server has prepared so far."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/kv/data")
    told = json.loads(connection.getresponse().read())
    connection.close()
    return int(told["requests"]["prepared"]["tokens"])


def second_turn(port: int, question: str, *, waits: bool) -> Turn:
    """The second turn of a chat, some time after the first."""
    messages = [{"role": "user", "content": question}]
    before = prepared_tokens(port)
    first = ask(port, messages, ANSWER_TOKENS)
    deadline = perf_counter() + PATIENCE_S
    while waits and prepared_tokens(port) == before:
        assert perf_counter() < deadline, "nothing is prepared"
        sleep(0.05)
    messages.append({"role": "assistant", "content": first.text})
    messages.append({"role": "user", "content": SENTENCE})
    return ask(port, messages, TURN_TOKENS)


@contextmanager
def both_servers(folder: Path, template: str) -> Iterator[dict[str, int]]:
    """The ports of a server that prepares next turns, and of one that does not."""
    with ExitStack() as stack:
        chat = ["--chat-template", template]
        yield {
            side: stack.enter_context(server("paged", folder, *chat, *options))
            for side, options in SIDES.items()
        }


def questions(tokenizer: Any, count: int, seed: str) -> list[str]:
    """Lines of Python's standard library."""
    rng = Random(seed)
    found = (source_tokens(rng, tokenizer, 4_000)[:QUESTION_TOKENS] for _ in range(count))
    return [tokenizer.decode(tokens) for tokens in found]


def of_template(folder: Path, name: str, *, has_times: bool) -> dict[str, Any]:
    """The figures of the chats of one template."""
    tokenizer = load_tokenizer(folder)
    ends = "<|im_end|>\n<|im_start|>assistant\n"
    figures: dict[str, Any] = {
        "message_tokens": len(tokenizer.encode(SENTENCE + ends, add_special_tokens=False))
    }
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    template = _TEMPLATE.replace("ANSWER", TEMPLATES[name])
    with both_servers(folder, template) as ports:
        for question in questions(tokenizer, CHATS if has_times else 1, name):
            for side, port in ports.items():
                turns[side].append(second_turn(port, question, waits=side == "on"))
                print(folder.name, name, side, turns[side][-1][1:], flush=True)
        if has_times and name == "shortened":
            figures["busy_ratio"] = busy_ratio(ports, tokenizer)
    pairs = list(zip(turns["off"], turns["on"], strict=True))
    figures["equal_texts"] = sum(off.text == on.text for off, on in pairs)
    figures["chats"] = len(pairs)
    for side, of in turns.items():
        figures[side] = {"computed_tokens": median(each.computed for each in of)}
        if has_times:
            figures[side]["first_token_seconds"] = median(each.first for each in of)
    if has_times:
        figures["first_token_ratio"] = median(off.first / on.first for off, on in pairs)
    return figures


def busy_seconds(port: int, asked: list[str]) -> float:
    """The time of chats of several clients at once, whose turns follow each other at once."""

    def chat(question: str) -> None:
        messages = [{"role": "user", "content": question}]
        for _ in range(TURNS):
            answer = {"role": "assistant", "content": ask(port, messages, TURN_TOKENS).text}
            messages += [answer, {"role": "user", "content": SENTENCE}]

    began = perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(chat, asked))
    return perf_counter() - began


def busy_ratio(ports: dict[str, int], tokenizer: Any) -> float:
    """Tokens a second with next turns prepared over those without, while clients keep the server
    busy: a median over runs."""
    ratios = []
    for run in range(BUSY_RUNS):
        asked = questions(tokenizer, CLIENTS, f"busy {run}")
        seconds = {side: busy_seconds(port, asked) for side, port in ports.items()}
        ratios.append(seconds["off"] / seconds["on"])
    return median(ratios)


def main() -> None:
    has_times = "--count" not in sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folders = {MODEL: Path(name) / MODEL, HYBRID: Path(name) / "hybrid"}
        write_float32(folders[MODEL])
        tiny_folder(folders[HYBRID], "qwen3_next", **HYBRID_LAYERS)
        models = {
            model: {each: of_template(folder, each, has_times=has_times) for each in TEMPLATES}
            for model, folder in folders.items()
        }
    write_result(
        "next_turns",
        {
            "blas": BLAS,
            "question_tokens": QUESTION_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
            "clients": CLIENTS,
            "has_times": has_times,
            "models": models,
        },
    )


if __name__ == "__main__":
    main()
