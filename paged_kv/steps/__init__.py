"""Sequences, and the steps that write and read their pages.

sequence             owns blocks, and tracks how many tokens each layer has
progress             counts the tokens of a layer of a sequence, and its padding
batch                sequences that take their steps together; the layers of a cache share it
step                 the next tokens of some sequences, planned once for all layers
transaction          whether a step still holds, which its sequences and reads know
step_row             a step in one sequence
group_step           a step in the layers of one group
step_metadata        makes the attention metadata of a step, and of its parts
step_blocks          reserves the blocks of a step
full_pages           recodes full pages to the format of their sequences
masks                the masks that a cache makes
visibility           what a mask lets queries see, in the terms of kernels
paged_array          arrays backed by pages
unwritten            what no page holds yet: long steps over rings, inputs of open groups
out_of_window_pages  caches pages that a window has passed, for prompts with the same prefix
"""
