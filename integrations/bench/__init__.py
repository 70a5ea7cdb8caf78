"""`paged-kv bench`: mlx-lm's caches beside pages, on the user's machine and model.

bench_command  the command
measurements   what is measured, one function each
cache_pairs    fills both kinds of caches with the same numbers
turns          measures two things in turns, within a time
report         the table, the JSON file and the plot, with the machine's name
"""
