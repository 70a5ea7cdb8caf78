"""Log messages that are worth reading once."""

import logging
from functools import cache

logger = logging.getLogger("paged_kv")


@cache
def warn_once(message: str) -> None:
    """Log a warning, unless it was logged before."""
    logger.warning(message)
