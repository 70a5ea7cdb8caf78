"""Runs the command `paged-kv` as `python -m paged_kv`."""

import sys

from paged_kv.command_line import main

sys.exit(main())
