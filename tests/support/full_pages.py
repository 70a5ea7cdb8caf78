"""The formats that full pages should have, by their place in a sequence."""

from paged_kv.kernels.pages.page_format import page_format_named

FIRST = {"q4": "q8", "q8/q4": "q8", "fp16/q4": "fp16/q8"}
"""The formats of a sequence's first page where the others have these; elsewhere it is the same."""


def full_format(name: str, page: int) -> str:
    """The format of a full page where full pages get the named format."""
    known = page_format_named(name).name
    return known if page else FIRST.get(known, known)


def full_formats(name: str, pages: int) -> list[str]:
    """The formats of the first `pages` pages, all full."""
    return [full_format(name, page) for page in range(pages)]
