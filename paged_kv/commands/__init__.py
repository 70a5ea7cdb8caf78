"""The subcommands of `paged-kv` that do not use mlx-lm.

arguments           parses the values of options
cache_options       the options of commands that make paged caches, and the look of help
interrupts          what Ctrl-C does to a command
model_names         checks the names of models
new_traces          `paged-kv trace synthesize`, `agents` and `import`
output_files        checks the files that commands write
stats_command       `paged-kv stats`
store_command       `paged-kv store`
trace_command       `paged-kv trace`
"""
