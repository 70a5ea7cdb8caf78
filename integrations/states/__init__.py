"""Keeps models without pages apart by sequence, and counts their tokens.

counted_states      recurrent states that know how many tokens they have taken in
separate_sequences  a batch of caches that mlx-lm cannot batch: one cache a sequence
model_call          what a model's call does besides: it counts, or takes one sequence at a time
equal_steps         computes prompts of unequal length without padding
"""
