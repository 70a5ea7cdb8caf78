"""Keeps the pages of a long prompt on disk: the second run of this program starts with them.

python examples/page_store.py MODEL FOLDER
"""

import sys

from mlx_lm import generate, load

from paged_kv import PagedCacheFactory

PROMPT = "A long document that every run asks about. " * 60 + "In short, it is about"

if len(sys.argv) != 3:
    sys.exit(__doc__)
model, tokenizer = load(sys.argv[1])
factory = PagedCacheFactory(model, max_bytes="4GB", store=sys.argv[2], store_bytes="10GB")
prompt = tokenizer.encode(PROMPT)
cache, cached = factory.fetch_cache(prompt)
print(f"{cached} of {len(prompt)} tokens come from {sys.argv[2]}")
print(generate(model, tokenizer, prompt[cached:], prompt_cache=cache, max_tokens=20))
factory.insert_cache(prompt, cache)
factory.close()  # waits until the pages are written
