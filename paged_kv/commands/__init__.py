"""The subcommands of `paged-kv` that know no mlx-lm.

arguments       types of options
stats_command   `paged-kv stats`
store_command   `paged-kv store`
trace_command   `paged-kv trace`
doctor_command  `paged-kv doctor`
doctor          what it examines
"""
