"""Page memory of one model: slabs under a byte budget, and the allocation of their blocks.

    page_pool      the pool: everything below, together
    options        its options, which commands and factories have too
    arguments      its other arguments, checked, and the page formats that a name means
    layer_group    the layers that share block tables: one allocator, and the pages of each layer
    window         a sliding window, and the ring of pages that holds it
    appended_rows  layers that append rows at a rate of their own
    reservation    blocks for the writes of a step, all or none, or a dry run of that
    reclaimer      reclaims memory when the budget gets short
    stats          counts of what it did, snapshots of its memory: each number is defined once

A pool does not know sequences.
"""
