"""Request bodies that a server must refuse, each with the expected status; many are generated."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "import os\n"},
    CHAT: {"messages": [{"role": "user", "content": "os"}]},
}
# Larger than Python turns into an int by default.
HUGE = "9" * 5000


class Bad(NamedTuple):
    """A request, and its answer.

    Attributes:
        param: the field that the error names; of a path the beginning.
    """

    path: str
    content: bytes
    status: int = 400
    param: str | None = None


INTEGERS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (-2, 2**31, 10**30),
    "max_completion_tokens": (0, -5, 2**63),
    "n": (0, -1, 129, 10**9),
    "priority": (-1, 101, 2**31, 10**30),
    "seed": (-(2**63) - 1, 2**64, 2**70, -(2**70)),
    "top_k": (-1, 4096, 10**9, 10**30),
    "top_logprobs": (-2, 21, 10**20),
    "prompt_logprobs": (-1, 21, 10**20),
    "num_draft_tokens": (-1, 257, 10**30),
    "min_tokens": (-1, 9000, 2**31, 10**30),
    "repetition_context_size": (-1, 2**31, 10**30),
    "presence_context_size": (-1, 10**30),
    "frequency_context_size": (-1, 10**30),
}
FLOATS: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 101, 1e300),
    "top_p": (-0.1, 1.1),
    "min_p": (-0.1, 1.1),
    "xtc_probability": (-0.1, 1.1),
    "xtc_threshold": (-0.1, 0.6),
    "repetition_penalty": (-0.1, 1e300),
    "presence_penalty": (1e300, -1e300),
    "frequency_penalty": (1e5, -(10**30)),
}
# Fields of OpenAI's API and of vLLM's that would change the answer.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "xml"}, {"type": "json_schema", "json_schema": {}}, "text"),
    "tool_choice": ("required", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": ("no", 0),
    "functions": ([],),
    "function_call": ("auto",),
    "best_of": (2,),
    "suffix": ("\n",),
    "modalities": (["text", "audio"],),
    "audio": ({},),
    "web_search_options": ({},),
    "guided_json": ({},),
    "guided_decoding_backend": ("a",),
    "structured_outputs": ({"xml": "a"}, {"regex": "a", "choice": ["a"]}, [], {"choice": []}),
    "truncate_prompt_tokens": (5,),
    "max_output_tokens": (5,),
    "temprature": (0.5,),
}
NO_INTEGERS: tuple[Any, ...] = ("5", 1.5, True, [], {})
NO_FLOATS: tuple[Any, ...] = ("0.5", False, [0.5], {})
NO_STRINGS: tuple[Any, ...] = (5, True, ["a"], {})


def bad_requests() -> dict[str, list[Bad]]:
    """Bad bodies, by their fault."""
    groups = {
        "integers": [bad for name in INTEGERS for bad in wrong(name, *NO_INTEGERS, *INTEGERS[name])]
        + [raw(name, HUGE, named=False) for name in INTEGERS],
        "floats": [bad for name in FLOATS for bad in wrong(name, *NO_FLOATS, *FLOATS[name])]
        + [
            raw(name, text, named=text == "1e999")
            for name in FLOATS
            for text in ("NaN", "Infinity", "-Infinity", "1e999")
        ],
        "strings": [
            bad
            for name in ("model", "draft_model", "adapters", "cache_salt", "session_id")
            for bad in wrong(name, *NO_STRINGS, "")
        ],
        "fields": list(_fields()),
        "prompts": list(_prompts()),
        "messages": list(_messages()),
        "JSON": list(_no_json()),
        "names": list(_names()),
    }
    assert sum(map(len, groups.values())) >= 150
    return groups


def wrong(name: str, *values: Any, path: str = TEXT) -> Iterator[Bad]:
    """A good body with one field replaced."""
    for value in values:
        body = GOOD[path] | {"temperature": 1.0} | {name: value}
        yield Bad(path, json.dumps(body).encode(), param=name)


def raw(name: str, value: str, path: str = TEXT, *, named: bool = True) -> Bad:
    """The same, with text that json.dumps would not write."""
    body = json.dumps(GOOD[path])[:-1] + f', "{name}": {value}}}'
    return Bad(path, body.encode(), param=name if named else None)


def _fields() -> Iterator[Bad]:
    yield from wrong("stream", "yes", 1, [])
    yield from wrong("stream_options", 5, "usage", [], {"include_usage": "yes"}, {"usage": True})
    yield from wrong("max_tokens", 0, path=CHAT)
    for name, values in UNSUPPORTED.items():
        yield from wrong(name, *values)
        yield from wrong(name, *values, path=CHAT)
    yield from wrong(
        "stop", 5, [5], {}, ["a", 5], [["a"]], ["x"] * 17, "x" * 4097, ["x" * 4090] * 2
    )
    yield from wrong("stop_token_ids", 5, "5", {}, ["5"], [-1], [4096], [1.5], [True], [1] * 129)
    yield from wrong("echo", "yes", 1, [])
    yield from wrong("echo", True, path=CHAT)
    yield from wrong("ignore_eos", "yes", 1, [])
    yield from wrong("logprobs", -1, 21, "yes", 1.5, [])
    yield from wrong("logprobs", 5, "yes", path=CHAT)
    yield from wrong("logit_bias", 5, "a", [], {"a": 1}, {"1": "2"}, {"1": None}, {"-1": 1.0})
    yield from wrong("logit_bias", {"4096": 1.0}, {"5000": 1.0}, {"2000000000": 1.0}, {"0": 1e5})
    yield from wrong("logit_bias", {"99999999999999999999": 1.0}, {"1.5": 1}, {"": 1}, {"0": 1e300})
    yield raw("logit_bias", '{"0": NaN}', named=False)
    yield raw("stop", '"\\ud800"', named=False)
    yield raw("stop", '["\\udfff"]', named=False)
    yield raw("cache_salt", '"\\ud800"', named=False)
    yield from wrong("cache_salt", "s" * 1025)
    for field in ("prompt_cache_key", "session_id"):
        yield from wrong(field, "", "s" * 257, 5, ["a"])
    yield Bad(
        CHAT,
        json.dumps(GOOD[CHAT] | {"session_id": "a", "prompt_cache_key": "b"}).encode(),
        param="session_id",
    )


def _prompts() -> Iterator[Bad]:
    yield Bad(TEXT, b"{}", param="prompt")
    yield from wrong("prompt", None, 5, True, {}, [], "", [""], [[]], [1.5], [True], [None])
    yield from wrong("prompt", [[1], "a"], ["a", 1], [[1], []], [["a"]], [[[1]]], ["a"] * 129)
    yield from wrong("prompt", [-1], [4096], [2**31], [2**70], [[0], [4096]], [-(2**63)])
    yield raw("prompt", '"\\ud83d"', named=False)
    yield raw("prompt", f"[{HUGE}]", named=False)
    yield Bad(TEXT, json.dumps({"prompt": ["a"] * 100, "n": 2}).encode(), param="n")


def _messages() -> Iterator[Bad]:
    yield Bad(CHAT, b"{}", param="messages")
    yield from wrong("messages", None, 5, "hello", [], {}, [5], ["hello"], [[]], path=CHAT)
    for message in (
        {},
        {"content": "a"},
        {"role": 5, "content": "a"},
        {"role": "user", "content": 5},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": [{"text": "a"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "sound", "data": "a"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1:9/a"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]},
        {"role": "assistant", "content": "a", "tool_calls": 5},
        {"role": "assistant", "content": "a", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": 5}]},
    ):
        yield from wrong("messages", [message], path=CHAT)
    yield from wrong("tools", 5, ["f"], {}, path=CHAT)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    yield from wrong("tools", [tool], path=CHAT)
    yield from wrong("reasoning_effort", "", "most", 5, path=CHAT)
    yield from wrong("reasoning_effort", "high")
    yield from wrong("role_mapping", 5, {"user": 5}, path=CHAT)
    yield from wrong(
        "chat_template_kwargs",
        5,
        [],
        {"return_tensors": "np"},
        {"tokenize": False},
        {"chat_template": "{{ 1 }}"},
        {"padding": True},
        {"max_length": 1},
        {"truncation": True},
        {"return_dict": True},
        {"add_generation_prompt": False},
        {"tokenizer_kwargs": {}},
        {"not a name": 1},
        path=CHAT,
    )


def _no_json() -> Iterator[Bad]:
    for path in (TEXT, CHAT):
        for content in (
            b"",
            b"{",
            b"null",
            b"[]",
            b'"a"',
            b"5",
            b"{'prompt': 'a'}",
            b'{"prompt": "a"} x',
            b'{"prompt": "\xff\xfe"}',
            b'{"prompt": "a\x00"}',
            '{"prompt": "a"}'.encode("utf-16"),
            '{"prompt": "a"}'.encode("utf-32"),
            b'{"prompt": "\\u12"}',
            b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
            b'{"a":' * 1_000 + b"1" + b"}" * 1_000,
            b"[" * 100_000,
            HUGE.encode(),
        ):
            yield Bad(path, content)


def _names() -> Iterator[Bad]:
    for path in (TEXT, CHAT):
        for name in ("model", "draft_model", "adapters"):
            for value in ("gpt-4", "../..", "no/such", "/etc/passwd", "http://127.0.0.1:9/a"):
                body = json.dumps(GOOD[path] | {name: value}).encode()
                yield Bad(path, body, 404, name)
