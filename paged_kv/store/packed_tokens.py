"""Packs token ids into few bytes that sort lists with common prefixes next to each other.

A token is a zigzag varint: groups of seven bits, the lowest first; the highest bit says that
another group follows. Zigzag keeps small negative ids short. No token's bytes are a prefix of
another's, so in the order of the bytes a list's neighbours share the longest prefix with it.
"""

from __future__ import annotations

from collections.abc import Iterable


def packed(tokens: Iterable[int]) -> bytes:
    """Token ids, any integers, as bytes: two or three per token of a usual vocabulary."""
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
