"""Layers that keep something else than keys and values, and models that take no ragged batch.

counted_states  recurrent states that know how many tokens they have taken in
growing_layers  finds out at which rates the caches of a model append rows
layer_rows      takes the place of such a cache: its rows are in pages, and arrays stand for them
one_by_one      computes the sequences of a step one after the other
"""
