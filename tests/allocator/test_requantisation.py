"""The blocks that can be requantised, and the age of each."""

import random

from paged_kv.allocator.block_allocator import BlockAllocator, BlockTable
from paged_kv.allocator.byte_budget import ByteBudget
from paged_kv.allocator.requantisation import full_blocks
from tests.support.reserving import reserve

PAGE = 4


def grown(allocator: BlockAllocator, table: BlockTable, tokens: int) -> None:
    reserve(table, table.tokens, table.tokens + tokens)


def test_a_block_is_as_old_as_its_youngest_holder_says_and_no_last_one_is_full() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        allocator = BlockAllocator(ByteBudget(1000), 1, PAGE)
        tables = [allocator.new_table()]
        for _ in range(12):
            table = rng.choice(tables)
            if rng.random() < 0.3 and table.blocks:
                tables.append(allocator.fork(table))
            else:
                grown(allocator, table, rng.randrange(1, 3 * PAGE))
        last = {table.blocks[-1] for table in tables if table.blocks}
        found = {each.block: each for each in full_blocks(allocator)}
        assert found.keys() == {b for table in tables for b in table.blocks} - last
        for block, each in found.items():
            holders = [table for table in tables if block in table.blocks]
            assert each.is_first == any(table.blocks[0] == block for table in holders)
            assert each.age == min(
                len(table.blocks)
                - 1
                - table.blocks.index(block)
                + (allocator.tokens_reserved - table.last_reserved) / PAGE
                for table in holders
            )
