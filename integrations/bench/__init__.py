"""`paged-kv bench`: mlx-lm's caches beside pages, on the user's machine and model.

bench_command  the command
comparisons    what is compared
turns          measures two things in turns, within a time
report         the table and the plot, with the machine's name
"""
