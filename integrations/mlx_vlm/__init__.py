"""Pages for the vision-language models of mlx-vlm, which has caches and functions of its own.

- `hooks.py` names its cache classes, replaces its functions that make, share and quantise caches,
  and batches sequences for models that look at the padding themselves.
- `indexed_layers.py` makes the caches of layers that attend to what an indexer chooses.
- `text_model.py` lets mlx-lm's generators run its models, and computes prompts with images.
- `image_generation.py` loads its models for the server, makes prompts of messages and images, and
  generates for `paged-kv generate --image`.
"""
