"""Runs the command `paged-kv`, which is also `python -m paged_kv`."""

import os
import sys


def run() -> int:
    """Run the command of this process and return its exit status."""
    try:
        # Before all that takes long to import: an interrupt ends imports too.
        from paged_kv.commands.interrupts import end_at_interrupts

        end_at_interrupts()
    except KeyboardInterrupt:
        os._exit(130)
    from paged_kv.command_line import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
