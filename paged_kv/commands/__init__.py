"""The subcommands of `paged-kv` that do not use mlx-lm.

arguments           parsers, what parses the values of options, and the check of files to write
interrupts          what Ctrl-C does to a command
model_names         the options of commands that load a model, and checks of names
stats_command       `paged-kv stats`
store_command       `paged-kv store`
"""
