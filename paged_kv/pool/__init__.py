"""Page memory of one model: slabs under a byte budget, and the allocation of their blocks.

    page_pool    the pool: everything below, together
    options      its options, which commands and factories have too
    arguments    its other arguments, checked, and the page formats that a name means
    layer_group  the layers that share block tables: one allocator, and the pages of each layer
    window       a sliding window, and the ring of pages that holds it
    reservation  blocks for the writes of a step, all or none
    reclaimer    reclaims memory when the budget gets short
    rehearsal    tries in copies of the allocators whether a sequence would fit
    stats        counts of what it did, snapshots of its memory: each number is defined once
    locked       one call at a time among pools that share a budget

A pool does not know sequences.
"""
