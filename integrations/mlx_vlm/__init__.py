"""Pages for the vision-language models of mlx-vlm, which has caches and functions of its own.

- `library.py` names its cache classes.
- `hooks.py` replaces its functions that make, share and quantise caches.
- `loading.py` loads models for the server.
- `text_model.py` lets mlx-lm's generators run them.
- `prompt_maker.py` makes prompts of messages and images, and `media_prompt.py` computes these.
- `image_generation.py` generates for `paged-kv generate --image`.
- `left_padded_cache.py` batches rows for models that look at the padding themselves.
"""
