"""Values of command line options."""

import argparse


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer, such as 8")
    return int(text)


def seconds(text: str) -> float:
    """More than no seconds."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, such as 0.5")
    return number


def length_range(text: str) -> tuple[int, int]:
    """Two lengths in tokens, or twice the same."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a range like 100,2000 nor a number")
    shortest, longest = int(parts[0]), int(parts[-1])
    if not 1 <= shortest <= longest:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be two lengths, the shorter first, from 1 on, such as 100,2000"
        )
    return shortest, longest


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.5")
    return number
