"""Page memory of one model: slabs under a byte budget, and the blocks handed out of them.

    page_pool    the pool: everything below, together
    arguments    its arguments, checked, with their defaults
    formats      the page formats that it was asked for
    layer_group  the layers that share block tables: one allocator, and the pages of each layer
    window       a sliding window, and the ring of pages that holds it
    reservation  blocks for the writes of a step, all or none
    reclaimer    where blocks come from when the budget gets short
    rehearsal    whether a sequence would fit, tried out in copies of the allocators
    counts       what has happened
    stats        snapshots of what the pool holds
    trace        records what happens to blocks
    registry     the pools that are open
    locked       one call at a time for all that share a budget

A pool does not know sequences.
"""
