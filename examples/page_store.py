"""Keeps the pages of a long prompt on disk: the second run of this program starts with them.

python examples/page_store.py FOLDER [MODEL]
"""

import sys

from example_model import load_model, question_tokens
from mlx_lm import generate

from paged_kv import PagedCacheFactory

PROMPT = "A long document that every run asks about. " * 60 + "In short, it is about"

if len(sys.argv) not in (2, 3):
    sys.exit(__doc__)
folder, *names = sys.argv[1:]
model, tokenizer = load_model(*names)
factory = PagedCacheFactory(model, max_bytes="4GB", store=folder, store_bytes="10GB")
prompt = question_tokens(tokenizer, PROMPT)
cache, cached = factory.fetch_cache(prompt)
print(f"{cached} of {len(prompt)} tokens come from {folder}")
print(generate(model, tokenizer, prompt[cached:], prompt_cache=cache, max_tokens=20))
factory.insert_cache(prompt, cache)
factory.close()  # waits until the pages are written
