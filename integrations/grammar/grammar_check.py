"""Compiles a grammar in a process of its own: python grammar_check.py SECONDS BYTES.

Reads `[kind, text]` as JSON from stdin. Exits with 0 if the grammar compiles; else the reason is
the last line of stderr. The system ends this process in time, whatever llguidance does and whether
or not its parent still runs.
"""

import json
import resource
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Exit with 0 if the grammar compiles."""
    seconds, most_bytes = map(int, sys.argv[1:])
    signal.alarm(seconds)
    with suppress(ValueError):  # macOS limits no memory, and may say so
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    from paged_kv.integrations.grammar.grammar_texts import require_valid
    from paged_kv.integrations.grammar.grammars import Grammar, GrammarError

    try:
        require_valid(Grammar(*json.load(sys.stdin)))
    except (GrammarError, RecursionError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
