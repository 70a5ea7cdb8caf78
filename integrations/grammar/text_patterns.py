"""What a schema says of a text, as regular expressions of llguidance that match a whole text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paged_kv.extras import extra_module

ANY_TEXT, SOME_TEXT = r"(.|\n)*", r"(.|\n)+"
# A parser drops spaces at the ends of such texts: with them a text could get too short.
_EDGE = r"[^\x00-\x20\x7f-\xa0\u1680\u2000-\u200f\u2028-\u202f\u205f\u3000\ufeff]"
TRIMMED = rf"({_EDGE}({ANY_TEXT}{_EDGE})?)?"

_DATE = (
    r"[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20})?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_WORDS = r"[A-Za-z0-9]+([.-][A-Za-z0-9]+)*"
# What these match has the format, not the other way round: llguidance takes long for more.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_WORDS}",
    "uri": (
        rf"[a-z][a-z0-9+.-]*:\/\/{_WORDS}(:[0-9]{{1,4}})?"
        r"(\/[A-Za-z0-9_.~-]*)*(\?[A-Za-z0-9_.~&=-]*)?"
    ),
}
# In a set of characters llguidance takes these for more than letters.
_SET_OPERATIONS = ("[", "&&", "--", "~~")


def text_patterns(schema: Mapping[str, Any]) -> list[str]:
    """The regular expressions that a text must match that fits a schema, in llguidance's syntax.

    Raises:
        ValueError: llguidance's regular expressions cannot say it.
    """
    found = []
    if "minLength" in schema or "maxLength" in schema:
        bounds = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
        found.append(f"(.|\\n){{{bounds}}}")
    if "pattern" in schema:
        found.append(found_within(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise ValueError(f"texts without quotes cannot have the format {schema['format']!r}")
        found.append(_FORMATS[schema["format"]])
    return found


def found_within(pattern: str) -> str:
    """What matches a whole text in which a regular expression of a JSON schema is found.

    Raises:
        ValueError: it is no text, llguidance would read a set of characters otherwise, or
            llguidance is not installed.
    """
    if not isinstance(pattern, str):
        raise ValueError("a pattern is a text")
    whole = []
    for part in _alternatives(pattern):
        begins, ends = part.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", part) is not None
        body = part[begins : len(part) - ends]
        whole.append(f"{'' if begins else ANY_TEXT}({body}){'' if ends else ANY_TEXT}")
    # Sets of characters are ASCII's, as ECMA's are.
    return str(extra_module("llguidance", "structured").regex_to_lark("|".join(whole), "dws"))


def exactly(text: str) -> str:
    """What matches nothing but this text."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of a regular expression."""
    depth, written = 0, ""
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        if len(part) > 2 and any(operation in part[1:] for operation in _SET_OPERATIONS):
            raise ValueError(f"the pattern has a set of characters that is not clear: {part}")
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            yield written
            written = ""
        else:
            written += part
    yield written
