"""The inputs of rows that a sequence keeps, and the trims that these allow."""

import itertools

import mlx.core as mx

from paged_kv import PagePool, Sequence
from paged_kv.allocator.errors import RollbackError
from paged_kv.pool.layer_kinds import DEFAULT_WRITE_CHUNK, AppendedRows, RowInput
from paged_kv.steps.progress import GroupInputs

RATE, INPUT = 4, "gate"


def tokens(start: int, end: int) -> mx.array:
    """The inputs of these tokens: their numbers."""
    return mx.arange(start, end).reshape(1, -1, 1)


def sequence_of(length: int, kept: int) -> Sequence:
    """A sequence whose layer was given the inputs of its latest tokens."""
    rows = AppendedRows("rows", RATE, 8, mx.float32, (RowInput(INPUT, 1, mx.float32),))
    sequence = Sequence(PagePool(1, rows={0: rows}, max_bytes=1 << 20))
    sequence.restore(0, length, length)
    sequence.layers.record_inputs(0, INPUT, tokens(length - kept, length))
    return sequence


def test_the_inputs_of_the_latest_tokens_are_kept() -> None:
    for steps, most in itertools.product(([1] * 9, [2, 3, 4], [9], [5, 1, 1, 1, 1]), (1, 4, 5)):
        kept, end = GroupInputs(), 0
        for count in steps:
            kept = kept.followed_by(tokens(end, end + count), most)
            end += count
            known = min(end, most)
            assert known <= len(kept) < most + max(steps)
            assert kept.last(known).flatten().tolist() == [*range(end - known, end)]


def test_a_trim_opens_only_a_group_of_which_all_inputs_are_kept() -> None:
    length = 10
    for kept, target in itertools.product(range(length + 1), range(length)):
        sequence = sequence_of(length, kept)
        is_known = target % RATE == 0 or target - target % RATE >= length - kept
        try:
            sequence.trim(0, length - target)
        except RollbackError:
            assert (is_known, sequence.length) == (False, length)
        else:
            assert (is_known, sequence.length) == (True, target)


def test_inputs_are_kept_for_as_many_tokens_as_may_be_trimmed() -> None:
    for length in range(1000, 1000 + RATE):
        assert sequence_of(length, length).rollback >= DEFAULT_WRITE_CHUNK
