"""Chats in the terminal; the conversation stays in pages, so each turn computes only its own text.

python examples/chat.py [MODEL]
"""

import sys
from contextlib import suppress

from example_model import load_model, question_tokens
from mlx_lm import stream_generate

from paged_kv import PagedCacheFactory

if len(sys.argv) > 2:
    sys.exit(__doc__)
model, tokenizer = load_model(*sys.argv[1:])
cache = PagedCacheFactory(model, max_bytes="4GB").make_cache()
with suppress(EOFError, KeyboardInterrupt):  # Ctrl-D and Ctrl-C end the chat
    while text := input("you: ").strip():
        prompt = question_tokens(tokenizer, text)
        for part in stream_generate(model, tokenizer, prompt, prompt_cache=cache, max_tokens=100):
            print(part.text, end="", flush=True)
        print()
