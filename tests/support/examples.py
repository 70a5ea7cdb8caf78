"""Sets how many examples hypothesis tries: few in the plain run, more in CI."""

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("PAGED_KV_EXAMPLES", "1"))


def examples(plain: int, **options: Any) -> settings:
    """Settings with the same examples in every run, `PAGED_KV_EXAMPLES` times as many as in the
    plain one."""
    return settings(
        derandomize=True,
        deadline=None,
        max_examples=plain * TIMES,
        # A deadline would measure the machine.
        suppress_health_check=[HealthCheck.too_slow],
        **options,
    )
