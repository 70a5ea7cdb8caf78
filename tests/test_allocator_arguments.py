"""The allocator refuses invalid sizes and counts."""

from typing import Any

import pytest

from paged_kv.allocator.block_allocator import BlockAllocator
from paged_kv.allocator.byte_budget import ByteBudget


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "256", None])
def test_bad_sizes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"page_size must be a positive integer, got {value!r}"):
        BlockAllocator(ByteBudget(100), 10, value)
    with pytest.raises(ValueError, match=f"max_bytes must be a positive integer, got {value!r}"):
        ByteBudget(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10"])
def test_bad_block_bytes_are_refused(value: Any) -> None:
    allocator = BlockAllocator(ByteBudget(100), 1)
    for attempt in (
        lambda: BlockAllocator(ByteBudget(100), value),
        lambda: allocator.set_block_bytes({"fp16": value}),
    ):
        with pytest.raises(
            ValueError, match=f"block_bytes must be a positive integer, got {value!r}"
        ):
            attempt()


def test_a_negative_count_is_refused() -> None:
    allocator = BlockAllocator(ByteBudget(100), 1)
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        allocator.allocate(-1)
    assert allocator.capacity == 0


def test_a_budget_never_counts_beyond_its_limits() -> None:
    budget = ByteBudget(100)
    budget.take(100)
    for nbytes in (1, -101):
        with pytest.raises(AssertionError):
            budget.take(nbytes)
    assert (budget.mapped, budget.left) == (100, 0)
