"""Speculative decoding of a batch: each row drafts, the model verifies all rows in one step.

drafts          what a draft is: it proposes tokens for the rows of a batch
ngram_draft     prompt look-up: what followed the same tokens earlier
model_draft     a smaller model, which drafts for all rows at once
verification    samples the model's tokens, and accepts the drafts that equal them
rollback        removes rejected tokens from the caches of a batch
draft_lengths   how many tokens to draft, from acceptance and measured times
batch           mlx-lm's GenerationBatch, with drafts
generator       mlx-lm's BatchGenerator, with drafts
draft_models    drafts by name, and memory divided between a model and its draft
speculative_generation  several prompts at once, from texts to texts
"""
