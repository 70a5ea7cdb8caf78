"""Layers that keep something else than keys and values, and models that take no ragged batch.

counted_states  recurrent states that know how many tokens they have taken in
layer_rows      finds out which rows caches append at which rates, and keeps them in pages
one_by_one      computes the sequences of a step one after the other, each with states of its own
"""
