"""Shortens the names in a kernel's text.

Half of a text is names, and MLX joins and hashes the whole text at every call. Only this project's
words are renamed: those in kernels/gpu, which uses only C++ and the words of dialect.h, and those
that dialect.h declares. A word gets the same name everywhere in a text. The most frequent words of
C++ become macros.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import count, product
from string import ascii_lowercase, ascii_uppercase

# Frequent words of C++ in headers.
FREQUENT = (
    "uint",
    "float",
    "const",
    "return",
    "for",
    "template",
    "ushort",
    "ulong",
    "bool",
    "void",
)
# Other words of C++, words of both dialects, and members of vectors.
_CPP = """
asm and auto break constexpr continue device constant do double else enum false half bfloat if
inline int metal namespace new not nullptr or paged_kv static std struct thread threadgroup true
typedef typename uchar unsigned using xor float2 float4 uint2 uint4 w x y z
"""
OTHERS = frozenset([*FREQUENT, *_CPP.split()])
_TOKEN = re.compile(r'"[^"\n]*"|\d[\w.]*|[A-Za-z_]\w*')
_SPACE = re.compile(r" ?([^\w\s\"#]) ?")


def words_of(text: str) -> list[str]:
    """The names and keywords of a text, without those in strings and numbers."""
    return [word for word in _TOKEN.findall(text) if word[0].isalpha() or word[0] == "_"]


def shortened(
    header: str, body: str, ours: Collection[str], arguments: Collection[str]
) -> tuple[str, str]:
    """Rename the words of `ours` in both parts of a text, and drop needless spaces. Lines stay.

    Args:
        arguments: names of kernel arguments, which stay in the body.
    """
    words = Counter(words_of(header) + words_of(body))
    foreign = OTHERS.union(re.findall(r"metal::(\w+)", header + body))
    taken = {*words, *foreign, *arguments}
    long = [word for word, _ in words.most_common() if word in ours and word not in foreign]
    short = dict(zip(long, _names(ascii_lowercase, taken), strict=False))
    of_header = Counter(words_of(header))
    # A macro takes a line of its own.
    worth = [word for word in FREQUENT if of_header[word] * (len(word) - 1) > len(word) + 11]
    macros = dict(zip(worth, _names(ascii_uppercase, taken), strict=False))
    defined = "".join(f"#define {name} {word}\n" for word, name in macros.items())
    of_body = {word: name for word, name in short.items() if word not in arguments}
    return defined + _dense(_renamed(header, short | macros)), _dense(_renamed(body, of_body))


def _names(letters: str, taken: Collection[str]) -> Iterator[str]:
    for length in count(1):
        for each in product(letters, repeat=length):
            if (name := "".join(each)) not in taken:
                yield name


def _renamed(text: str, names: dict[str, str]) -> str:
    return _TOKEN.sub(lambda found: names.get(found[0], found[0]), text)


def _dense(text: str) -> str:
    """Drop needless spaces; macros and lines with strings stay as they are."""
    lines = [
        line if line.startswith("#") or '"' in line else _SPACE.sub(r"\1", line)
        for line in text.splitlines()
    ]
    return "\n".join(lines) + "\n"
