"""The subcommands of `paged-kv` that do not use mlx-lm.

arguments           parses the values of options
cache_options       the options of commands that make paged caches, and the look of help
stats_command       `paged-kv stats`
store_command       `paged-kv store`
trace_command       `paged-kv trace`
completion_command  `paged-kv completion`
"""
