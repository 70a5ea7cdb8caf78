"""Sequences, and the steps that write and read their pages.

sequence             owns blocks, and knows how many tokens each layer has
progress             counts the tokens of a layer of a sequence, and its padding
batch                sequences that take their steps together; the layers of a cache share it
step                 the next tokens of some sequences, planned once for all layers
step_row             a step in one sequence
transaction          whether a step still holds, which its sequences and reads know
blocks               the blocks of a step: recodes full pages, and reserves
metadata             where kernels find the tokens of a step, and of its parts
read                 what attention asks of a step
arrays               arrays that stand for pages
masks                the masks that a cache makes, and what a mask lets queries see
unwritten            what no page holds yet: long steps over rings, inputs of open groups
out_of_window_pages  caches pages that a window has passed, for prompts with the same prefix
recorded             a step that `mx.compile` records
"""
