"""A model that says what a test wants, with the prompts of models that think and call tools.

Its weights are random: a logits processor dictates each answer. Everything else is as with any
model: templates, pages, batches, stop texts and the parsing of thoughts and calls.
"""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm import server

from paged_kv.server.engine import sampling
from tests.support.folders import MODEL_FOLDERS
from tests.support.zoo import small_model

END = "<|im_end|>"
MARKS = ("<|im_start|>", END, "<think>", "</think>", "<tool_call>", "</tool_call>")
VOCABULARY = 4096 + len(MARKS)
CONTEXT = 65_536

# In the manner of Qwen's.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- elif message.role in ('user', 'system', 'assistant') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}{{ message.content.lstrip('\\n') }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{%- else %}{{ raise_exception('there is no role ' + message.role) }}
{%- endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if reasoning_effort %}{{ '<effort>' + reasoning_effort }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
# It refuses instructions behind the first message, as Qwen's newer ones do.
STRICT_TEMPLATE = (
    "{%- for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be the first') }}{% endif %}{% endfor %}"
    + TEMPLATE
)


def agent_folder(parent: Path, template: str = TEMPLATE) -> str:
    """The folder of such a model, made within another."""
    source, folder = MODEL_FOLDERS["stdlib-llama"], parent / "agent"
    shutil.copytree(source, folder)
    _change(folder / "config.json", eos_token_id=_id(END), max_position_embeddings=CONTEXT)
    _change(folder / "tokenizer_config.json", eos_token=END, chat_template=template)
    known = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    added = [known[0] | {"id": _id(mark), "content": mark, "special": False} for mark in MARKS]
    _change(folder / "tokenizer.json", added_tokens=[*known, *added])
    (folder / "generation_config.json").unlink()
    return str(folder)


class Script:
    """What the model says to the next requests, in their order; other answers are random."""

    def __init__(self) -> None:
        self._answers: deque[str] = deque()

    def says(self, *answers: str) -> None:
        """Dictate further answers."""
        self._answers.extend(answers)

    def processors(self, tokenizer: Any) -> list[Any]:
        """The logits processors of the next request."""
        if not self._answers:
            return []
        tokens = tokenizer.encode(self._answers.popleft(), add_special_tokens=False)
        return [_dictating([*tokens, _id(END)])]


@contextmanager
def dictated() -> Iterator[Script]:
    """Let servers load the model, and say what the script says."""
    script = Script()
    tokenizers = []

    def load(path: str, **options: Any) -> Any:
        loaded = mlx_lm.load(path, lazy=True, **options)
        tokenizers.append(loaded[1])
        model = small_model("llama", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
        return (model, *loaded[1:])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "load", load)
        patched.setattr(sampling, "logits_processors", lambda _: script.processors(tokenizers[-1]))
        yield script


def _dictating(tokens: list[int]) -> Callable[[mx.array, mx.array], mx.array]:
    first: int | None = None

    def process(context: mx.array, logits: mx.array) -> mx.array:
        nonlocal first
        if context.size == 2:  # the server tries the processor
            return logits
        first = context.size if first is None else first
        token = tokens[min(context.size - first, len(tokens) - 1)]
        return logits + mx.where(mx.arange(logits.shape[-1]) == token, 1e5, 0.0)

    return process


def _id(mark: str) -> int:
    return 4096 + MARKS.index(mark)


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
