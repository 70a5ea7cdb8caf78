"""Damages page files and entries on servers in different ways."""

import random

from paged_kv.store.entry_file import HEADER_BYTES, Seal

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


def forged(rng: random.Random, entries: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The entries as somebody without the secret could leave them."""
    names = list(entries)
    changed = {}
    for name, data in entries.items():
        other = entries[rng.choice(names)]
        match rng.randrange(7):
            case 0:
                at = rng.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[: rng.randrange(len(data))]
            case 2:
                data = data + b"\0"
            case 3 if other != data:
                data = other
            case 4:
                # Sealed with a guess.
                sealed = Seal(b"guess" * 8).sealed(name.decode()[9:], [data[HEADER_BYTES:]])
                data = b"".join(sealed)
            case 5:
                data = data[:HEADER_BYTES] + rng.randbytes(len(data) - HEADER_BYTES)
            case _:
                data = rng.randbytes(rng.randrange(1, 200))
        changed[name] = data
    return changed
