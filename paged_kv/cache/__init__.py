"""The cache that mlx-lm's models use, and how it is saved.

paged_kv_cache    one layer of a list of sequences, with the protocol of mlx-lm's caches
chunked_kv_cache  the same for layers that attend by chunks
dependencies      keeps arrays in the graph that a model makes its cache depend on
other_caches      takes the tokens of caches without pages into pages
saved_state       saves sequences as trees of arrays, numbers and strings, and restores them
"""
