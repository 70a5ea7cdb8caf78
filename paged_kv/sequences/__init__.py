"""Sequences, and the steps that write and read their pages.

sequence             owns blocks, and knows how far each layer has come
padding              which tokens of a batch are no tokens of a sequence
step                 the next tokens of some sequences, decided once for all layers
step_row             a step in one sequence
step_view            a step in the layers of one group
row_views            where kernels find the tokens of a step
step_blocks          reserves the blocks of a step
masks                the masks that a cache makes
paged_array          arrays that stand for pages
stand_in             arrays that have a shape and cannot be computed
pending_step         a step that a ring takes only after it was read
out_of_window_pages  pages that a window has passed, cached for prompts that begin alike
steps                begin, append, read, commit and convert: what callers use
"""
