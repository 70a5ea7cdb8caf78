"""The command `paged-kv generate`: continues prompts with a model of mlx-lm.

generate_command  the command and its options
text_generation   generates for it, and prints
"""
