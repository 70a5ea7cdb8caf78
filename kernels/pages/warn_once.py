"""Logs each warning once."""

import logging
from functools import cache

logger = logging.getLogger("paged_kv")


@cache
def warn_once(message: str) -> None:
    """Log a warning unless this process has logged it before."""
    logger.warning(message)
