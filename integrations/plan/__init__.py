"""`paged-kv plan`: whether a model and its sessions fit into a machine's memory.

memory_plan    what models, prompt steps and sessions take, and what could change
plan_command   the command, its table and its JSON
"""
