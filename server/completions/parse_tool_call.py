"""Parses one tool call in a process of its own: python parse_tool_call.py MODULE PARSER SECONDS.

Reads `[text, tools]` as JSON from stdin and writes the parsed call as JSON to stdout. The system
ends this process in time, whatever the parser does and whether or not its parent still runs.
"""

import importlib
import json
import resource
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from types import ModuleType

# Some parsers can repeat one part of the text for every few letters of another part: 300,000
# characters can become 10 GB.
MOST_BYTES = 1 << 30
# Escapes make JSON longer: "\u0000" stands for one character.
MOST_GROWTH = 8


def main() -> None:
    """Exit with 0 if the parser understands the call."""
    module, name, seconds = sys.argv[1:]
    signal.alarm(int(seconds))
    with suppress(ValueError):  # macOS limits no memory, and may say so
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    text, tools = json.load(sys.stdin)
    _stub(module.partition(".")[0])
    parse = getattr(importlib.import_module(module), name)
    parsed = json.dumps(parse(text, tools))
    if len(parsed) > MOST_GROWTH * len(text):
        raise ValueError(f"{len(text)} characters became {len(parsed)}")
    sys.stdout.write(parsed)


def _stub(package: str) -> None:
    """Let modules of a package be imported without its `__init__`: mlx_lm's imports MLX and
    transformers, which takes a second, and its parsers need neither."""
    spec, stub = find_spec(package), ModuleType(package)
    stub.__path__ = (spec and spec.submodule_search_locations) or []
    sys.modules[package] = stub


if __name__ == "__main__":
    main()
