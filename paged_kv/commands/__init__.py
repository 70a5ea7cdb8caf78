"""The subcommands of `paged-kv` that do not use mlx-lm.

arguments           parsers, and what parses the values of options
interrupts          what Ctrl-C does to a command
model_names         checks the names of models
model_options       the options of commands that load a model
output_files        checks the files that commands write
stats_command       `paged-kv stats`
store_command       `paged-kv store`
"""
