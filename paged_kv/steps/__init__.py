"""Sequences, and the steps that write and read their pages.

sequence   owns blocks, and knows how many tokens each layer has
progress   counts the tokens of layers, and their padding; how far they can be rolled back
batch      sequences that take their steps together; the layers of a cache share it
step       the next tokens of some sequences, planned once for all layers
blocks     the blocks of a step: recodes full pages, reserves, caches what rings pass
metadata   where kernels find the tokens of a step, and of its parts
read       all tokens of a layer at one step, as attention asks for them
arrays     arrays that stand for pages
masks      the masks that a cache makes, and what a mask lets queries see
unwritten  long steps over rings, which no page holds yet
recorded   a step that `mx.compile` records
"""
