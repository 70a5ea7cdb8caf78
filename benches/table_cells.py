"""Formats numbers and names for the tables."""

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]], texts: int = 1) -> str:
    """A table whose first columns are texts, so many, and whose others are numbers."""
    heads = list(head)
    rule = [*["---"] * texts, *["---:"] * (len(heads) - texts)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def spaced(name: str) -> str:
    return name.replace("_", " ")


def count(number: float) -> str:
    return f"{number:,.0f}"


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def three_digits(number: float) -> str:
    """All before the point, where there are more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def millis(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def micros(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e3:,.1f} µs"


def giga(number: float, unit: str) -> str:
    return f"{number / 1e9:,.1f} G{unit}"


def percent(share: float, digits: int = 0) -> str:
    return f"{share:.{digits}%}"
