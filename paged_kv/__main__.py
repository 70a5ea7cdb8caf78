"""`python -m paged_kv` is the command `paged-kv`."""

import sys

from paged_kv.command_line import main

sys.exit(main())
