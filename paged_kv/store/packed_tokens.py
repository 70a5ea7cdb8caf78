"""Token ids as few bytes, in an order that tells which begin alike.

A token is its number, zigzag so that small negative ones stay short, in groups of seven bits, the
lowest first; the highest bit says that another group follows. So no token's bytes are the beginning
of another's, and where lists are sorted by their bytes, the neighbours of a list share most first
tokens with it.
"""

from __future__ import annotations

from collections.abc import Iterable


def packed(tokens: Iterable[int]) -> bytes:
    """Token ids, any integers, as bytes: two or three for each of a usual vocabulary."""
    data = bytearray()
    for token in tokens:
        number = token << 1 if token >= 0 else ~(token << 1)
        while number > 0x7F:
            data.append(number & 0x7F | 0x80)
            number >>= 7
        data.append(number)
    return bytes(data)


def unpacked(data: bytes) -> tuple[int, ...]:
    """The token ids that `packed` was given."""
    tokens = []
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte <= 0x7F:
            tokens.append(~(number >> 1) if number & 1 else number >> 1)
            number = shift = 0
    return tuple(tokens)
