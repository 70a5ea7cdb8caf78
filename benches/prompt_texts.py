"""The processor time of turning chats into tokens: python -m benches.prompt_texts

The chat is of 100,000 tokens in SmolLM2's tokenizer. "plain" has questions and answers in SmolLM2's
template; "agent" has reasoning, calls of tools and their results in one that is like Qwen's, and
three marks of what is to stay cached. Each turn adds an answer and a question. The server reads
each turn's whole prompt, in turns with kept tokens and without. Figures are seconds of processor
time: medians of the turns behind the first, and of the ratios within a turn. Rows also have:

    rendering_seconds    what the chat template takes of it, which runs whole at every turn
    first_seconds        of the first turn, when nothing is kept
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from mlx_lm.utils import load_tokenizer

from benches.real_models.folders import model_folder
from benches.results_file import write_result
from paged_kv.integrations.bench.turns import ratio
from paged_kv.server.completions.interface import Mark
from paged_kv.server.completions.prompt_reader import read_chat
from paged_kv.server.engine.chat_templates import kept_tokens_of, roles_of
from paged_kv.server.engine.paged_model_provider import LoadedModel
from paged_kv.server.http.schema import ChatBody
from paged_kv.server.options import ServerOptions
from tests.support.agent_model import TEMPLATE

TURNS, TOKENS = 8, 100_000
# A message of a tool, or of a user, has some 450 tokens.
MESSAGE_CHARACTERS = 1500
ROOT = Path(__file__).parent.parent
FILES = ("README.md", "docs/architecture.md", "integrations/paged_cache_factory.py", "setup.py")
TEXT = "".join((ROOT / name).read_text(encoding="utf-8") for name in FILES)


def load_described(template: str | None, *, keeps: bool) -> LoadedModel:
    """SmolLM2's tokenizer as the server describes it, with another template if one is given. No
    weights are loaded."""
    tokenizer: Any = load_tokenizer(model_folder("smollm2"))
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.model_max_length = 1 << 60
    tokenizer.encode("")
    unused: Any = None
    return LoadedModel(
        key=(None, None, None),
        tokenizer=tokenizer,
        processor=None,
        prompts=None,
        media_marks={},
        why_no_images=None,
        vocab_size=len(tokenizer),
        context_length=None,
        is_batchable=True,
        has_states=False,
        at_pages=False,
        text_machine=unused,
        callless_machine=unused,
        roles=roles_of(tokenizer, {}),
        grammars=unused,
        kept_tokens=kept_tokens_of(tokenizer) if keeps else None,
    )


def texts() -> Iterator[str]:
    """Texts of messages, all different."""
    for number in count():
        start = number * 977 % (len(TEXT) - MESSAGE_CHARACTERS)
        yield f"{number}: {TEXT[start : start + MESSAGE_CHARACTERS]}"


def asked(text: str) -> list[dict[str, Any]]:
    """A plain turn: an answer, and the next question."""
    return [{"role": "assistant", "content": text[:700]}, {"role": "user", "content": text[700:]}]


def called(text: str) -> list[dict[str, Any]]:
    """A turn of an agent: a thought with a call, and what the tool says."""
    function = {"name": "read", "arguments": json.dumps({"path": text[:40]})}
    call = {"id": text[:8], "type": "function", "function": function}
    thought = {"role": "assistant", "content": "", "reasoning_content": text[:300]}
    result = {"role": "tool", "tool_call_id": text[:8], "content": text[300:]}
    return [thought | {"tool_calls": [call]}, result]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The processor seconds of a call, and what it returns."""
    began = process_time()
    made = work()
    return process_time() - began, made


def figures_of(kind: str) -> dict[str, Any]:
    """The figures of one kind of chats."""
    is_agent = kind == "agent"
    turn, template = (called, TEMPLATE) if is_agent else (asked, None)
    whole, keeping = (load_described(template, keeps=keeps) for keeps in (False, True))
    options, more = ServerOptions(), texts()
    messages = [
        {"role": "system", "content": TEXT[:20_000]},
        {"role": "user", "content": "Read all."},
    ]

    def read(loaded: LoadedModel) -> tuple[float, Any]:
        body = ChatBody.model_validate({"messages": messages})
        marks = (
            [Mark(end, 300.0) for end in (1, len(messages) - 2, len(messages))] if is_agent else []
        )
        return timed(lambda: read_chat(loaded, body, options, marks))

    while len(whole.tokenizer.apply_chat_template(messages)) < TOKENS:
        for text in islice(more, 10):
            messages += turn(text)
    first, rows = read(keeping)[0], []
    for text in islice(more, TURNS):
        messages += turn(text)
        (slow, expected), (quick, prompt) = read(whole), read(keeping)
        assert prompt.tokens == expected.tokens
        render = partial(whole.tokenizer.apply_chat_template, messages, tokenize=False)
        rows.append((slow, quick, timed(render)[0]))
    slows, quicks, renders = map(list, zip(*rows, strict=True))
    return {
        "kind": kind,
        "tokens": len(prompt.tokens),
        "messages": len(messages),
        "whole_seconds": median(slows),
        "kept_seconds": median(quicks),
        "times_quicker": ratio(slows, quicks),
        "rendering_seconds": median(renders),
        "first_seconds": first,
    }


def main() -> None:
    """Measure, and write the figures."""
    rows = [figures_of(kind) for kind in ("plain", "agent")]
    for row in rows:
        print(row)
    write_result("prompt_texts", {"rows": rows})


if __name__ == "__main__":
    main()
