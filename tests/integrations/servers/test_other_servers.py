"""Servers that others made give the same texts with pages as without, and share prompts.

python -m benches.other_servers --install       fetches them; without them these tests are skipped
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from benches.other_servers import SERVERS, Running, is_installed, serving
from benches.serving_http import write_float32
from tests.support.folders import MODEL_FOLDERS
from tests.support.grids import plain_only
from tests.support.ports import free_port

CLIENTS = 4


def answers(server: Running, source: str) -> list[Any]:
    """What clients get: for different prompts, equal beginnings, and a conversation, while one of
    them leaves a stream."""
    with (
        OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any") as client,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        ask: Any = partial(client.completions.create, model=server.model, temperature=0)
        stream = ask(prompt=source[6000:6600], max_tokens=400, stream=True)
        next(iter(stream))
        complete = partial(ask, max_tokens=12)
        prompts = [source[700 * at :][: 200 + 90 * at] for at in range(CLIENTS)]
        found = [*clients.map(lambda prompt: complete(prompt=prompt), prompts)]
        stream.close()
        common = source[1000:3500]
        prompts = [common + source[9000:][: 80 * at + 9] for at in range(CLIENTS)]
        found += clients.map(lambda prompt: complete(prompt=prompt), prompts)
        for turn in range(3):
            common += source[20_000 + 100 * turn :][:80]
            found.append(complete(prompt=common))
            common += found[-1].choices[0].text
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
# The scheduler of vllm-mlx is that of Rapid-MLX in most of its lines.
@pytest.mark.parametrize("name", plain_only(["rapid-mlx"], SERVERS))
def test_texts_are_equal_with_pages_and_without(
    name: str, tmp_path: Path, source_text: str
) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not there: python -m benches.other_servers --install")
    write_float32(tmp_path, MODEL_FOLDERS["stdlib-llama"])
    with serving(name, tmp_path, free_port(), pages=None) as stock:
        expected = answers(stock, source_text)
    with serving(name, tmp_path, free_port(), pages=["--max-kv-bytes", "200MB"]) as paged:
        found = answers(paged, source_text)
    assert [each.choices[0].text for each in found] == [each.choices[0].text for each in expected]
    if name == "rapid-mlx":
        usage = found[-1].usage
        assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens / 2
