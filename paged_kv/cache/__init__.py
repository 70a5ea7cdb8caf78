"""The cache that models of mlx-lm see, and how it is saved.

paged_kv_cache  one layer of a list of sequences, with the protocol of mlx-lm's caches
saved_state     sequences as trees of arrays, numbers and strings, and back
page_transfer   whole pages out of a pool, and into one
"""
