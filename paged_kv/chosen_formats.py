"""What a user gives as `page_format`: the name of a format, "auto", or a policy."""

from __future__ import annotations

from paged_kv.allocator.demotion import DemotionPolicy, OldestFirst
from paged_kv.kernels.page_format import FP16, FormatName, PageFormat, page_format_named

FormatChoice = FormatName | DemotionPolicy


def chosen_formats(choice: FormatChoice) -> tuple[PageFormat, DemotionPolicy | None]:
    """The format that pages begin with, and what makes them smaller, if anything does.

    Raises:
        ValueError: no format has that name, or the policy's watermark is not a share of the budget.
    """
    policy = OldestFirst() if choice == "auto" else choice
    if isinstance(policy, str | tuple | list):
        return page_format_named(policy), None
    if not 0 < policy.watermark <= 1:
        raise ValueError(f"watermark must lie in (0, 1], got {policy.watermark}")
    for name in policy.page_formats:
        page_format_named(name)
    return FP16, policy
