"""Assembles the source text of the GPU kernels for MLX.

kernels/gpu holds the code that Metal and CUDA share, in words that kernels/metal/dialect.h and
kernels/cuda/dialect.h define. A file kernels/metal/OPERATION.metal or kernels/cuda/OPERATION.cu is
the body of a kernel, after the file `begin` that all bodies share; MLX writes the signature.

MLX joins and hashes the whole text at every call, about half a microsecond for 1,000 characters. So
a text holds only what its kernel uses: no comments, no parts of other variants (`#ifdef` is decided
here), and of the headers only the declarations that the body reaches. Half of what is left is
names, which `shortened` shortens.

This file does not import MLX, so that benches/cuda_texts.py can load it alone.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count, product
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

KERNELS = Path(__file__).parents[1]
SUFFIXES = {"metal": "metal", "cuda": "cu"}

# All headers; none uses a later one. Each is in the dialect's folder or in kernels/gpu. Only CUDA
# has `mma`. The constants of a variant follow the first header.
HEADERS = ["dialect", "pages", "slots", "reading", "write", "summaries", "copy", "gather"]
HEADERS += ["decode", "merge", "latent", "mma", "matrices", "prefill_plan", "prefill", "wide"]
HEADERS += ["latent_groups"]

# Operations that take no pages.
WITHOUT_PAGES = {"merge"}

# The model's dtype in each dialect.
NUMBERS = {
    "metal": {"float16": "half", "bfloat16": "bfloat"},
    "cuda": {"float16": "__half", "bfloat16": "__nv_bfloat16"},
}


@dataclass(frozen=True)
class KernelText:
    """A kernel's text for MLX: the declarations before it, and its body without a signature."""

    header: str
    body: str


def kernel_text(
    dialect: str, operation: str, dtype: str, constants: Mapping[str, int], flags: Collection[str]
) -> KernelText:
    """One variant of an operation.

    Args:
        dtype: the model's, "float16" or "bfloat16".
        constants: numbers by their names in the text.
        flags: the names for which `#ifdef` holds.
    """
    flags = {*flags, dtype.upper()}
    suffix = SUFFIXES[dialect]
    names = [operation] if operation in WITHOUT_PAGES else ["begin", operation]
    body = "\n".join(plain(source(KERNELS / dialect / f"{name}.{suffix}"), flags) for name in names)
    items = [f"typedef {NUMBERS[dialect][dtype]} T;"]
    for name in HEADERS:
        path = header_path(dialect, name)
        if path.exists():
            items += _items(plain(source(path), flags))
        if name == "dialect":
            items += [f"CONSTANT uint {each} = {number};" for each, number in constants.items()]
    header = _namespace(_reached(items, body)) + _most_threads(dialect, constants)
    return KernelText(header, f"\n{body}\n")


def _most_threads(dialect: str, constants: Mapping[str, int]) -> str:
    """Stands before the signature of a Metal kernel with threads that need many registers: its
    compiler then gives them no more than so many threads can have."""
    if dialect != "metal" or "THREADS" not in constants:
        return ""
    return f"[[max_total_threads_per_threadgroup({constants['THREADS']})]]\n"


def own_words(dialect: str) -> set[str]:
    """This project's words, which may be renamed: those in kernels/gpu, and the dialect's
    declarations."""
    ours: set[str] = set()
    for name in HEADERS:
        path = header_path(dialect, name)
        if path.parent.name == "gpu" and path.exists():
            lines = [line for line in source(path).splitlines() if not line.startswith("#")]
            ours.update(_WORD.findall(plain("\n".join(lines))))  # of all variants
        elif name == "dialect":
            ours.update(*map(_names, _items(plain(source(path)))))
    return ours


def header_path(dialect: str, name: str) -> Path:
    """Where a header is."""
    own = KERNELS / dialect / f"{name}.h"
    return own if own.exists() else KERNELS / "gpu" / f"{name}.h"


@cache
def source(path: Path) -> str:
    """A file as it is."""
    return path.read_text()


def plain(text: str, flags: Collection[str] = ()) -> str:
    """A text without comments, indentation, blank lines and parts for other flags."""
    lines, holds = [], [True]
    for line in text.splitlines():
        line = line.partition("//")[0].strip()
        word, _, flag = line.partition(" ")
        if word in ("#ifdef", "#ifndef"):
            holds.append((flag in flags) == (word == "#ifdef"))
        elif word == "#else":
            holds[-1] = not holds[-1]
        elif word == "#endif":
            holds.pop()
        elif line and all(holds):
            lines.append(line)
    return "\n".join(lines)


def _items(text: str) -> list[str]:
    """The declarations of a plain text. Each ends with a semicolon or brace, outside all braces."""
    items: list[str] = []
    lines: list[str] = []
    depth = 0
    for line in text.splitlines():
        lines.append(line)
        depth += line.count("{") - line.count("}")
        if not depth and (line.endswith((";", "}")) or line.startswith("#define")):
            items.append("\n".join(lines))
            lines.clear()
    assert not lines, f"no declaration ends here: {lines[0]!r}"
    return items


_WORD = re.compile(r"[A-Za-z_]\w*")
_NAMES = (
    re.compile(r"#define (\w+)"),
    re.compile(r"(?:struct|enum) (\w+)"),
    re.compile(r"typedef .*?(\w+);", re.DOTALL),
    re.compile(r"(\w+)(?:<\w+>)?\("),
    re.compile(r"(\w+) ="),
)


def _names(item: str) -> set[str]:
    """The names that a declaration declares."""
    if item.startswith("CONSTANT"):
        return set(re.findall(r"(\w+) =", item))
    if item.startswith("enum"):
        return set(_WORD.findall(item))
    for pattern in _NAMES:
        if (found := pattern.search(item)) is not None:
            return {found[1]}
    raise AssertionError(f"what does this declare? {item!r}")


def _reached(items: Iterable[str], body: str) -> list[str]:
    """The declarations that the body uses, directly or through others."""
    used, kept = set(_WORD.findall(body)), []
    for item in reversed([*items]):
        if _names(item) & used:
            used.update(_WORD.findall(item))
            kept.append(item)
    return kept[::-1]


def _namespace(items: list[str]) -> str:
    first = "\n".join(item for item in items if item.startswith("#define"))
    rest = "\n".join(item for item in items if not item.startswith("#define"))
    return f"{first}\nnamespace paged_kv {{\n{rest}\n}}\n"


# Frequent words of C++ in headers.
_FREQUENT = "uint float const return for template ushort ulong bool void"
FREQUENT = tuple(_FREQUENT.split())
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

    Only this project's words are renamed: those in kernels/gpu, which uses only C++ and the words
    of dialect.h, and those that dialect.h declares. A word gets the same name everywhere in a text.
    The most frequent words of C++ become macros.

    Args:
        arguments: names of kernel arguments, which stay in the body.
    """
    words = Counter(words_of(header) + words_of(body))
    foreign = OTHERS.union(re.findall(r"metal::(\w+)", header + body))
    taken = {*words, *foreign, *arguments}
    long = [word for word, _ in words.most_common() if word in ours and word not in foreign]
    short = dict(zip(long, _short_names(ascii_lowercase, taken), strict=False))
    of_header = Counter(words_of(header))
    # A macro takes a line of its own.
    worth = [word for word in FREQUENT if of_header[word] * (len(word) - 1) > len(word) + 11]
    macros = dict(zip(worth, _short_names(ascii_uppercase, taken), strict=False))
    defined = "".join(f"#define {name} {word}\n" for word, name in macros.items())
    of_body = {word: name for word, name in short.items() if word not in arguments}
    return defined + _dense(_renamed(header, short | macros)), _dense(_renamed(body, of_body))


def _short_names(letters: str, taken: Collection[str]) -> Iterator[str]:
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
