"""Damages page files in different ways."""

import random

KINDS = ("flip", "flips", "truncate", "append", "zeros", "swap", "repeat", "header")


def damaged(data: bytes, other: bytes, numbers: random.Random) -> tuple[str, bytes]:
    """Damage a file; returns the kind of damage and the new bytes. `other` is another sound
    file."""
    kind = numbers.choice(KINDS)
    content = bytearray(data)
    at = numbers.randrange(len(content))
    if kind == "flip":
        content[at] ^= 1 << numbers.randrange(8)
    elif kind == "flips":
        for _ in range(numbers.randrange(2, 9)):
            content[numbers.randrange(len(content))] ^= numbers.randrange(1, 256)
    elif kind == "truncate":
        del content[at:]
    elif kind == "append":
        content += numbers.randbytes(numbers.randrange(1, 5000))
    elif kind == "zeros":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    elif kind == "swap":
        content = bytearray(other)
    elif kind == "repeat":
        content[at:at] = content[at : at + 64]
    else:
        content[numbers.randrange(min(1500, len(content)))] ^= 1 << numbers.randrange(8)
    return kind, bytes(content)
