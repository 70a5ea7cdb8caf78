"""Answers several questions that share a system prompt: its pages are computed and held once.

python examples/shared_system_prompt.py [MODEL]
"""

import sys
from itertools import takewhile

from example_model import load_model, question_tokens
from mlx_lm import batch_generate, generate

from paged_kv import PagedCacheFactory

SYSTEM = "You answer in one short sentence, and say so when you do not know. " * 10
QUESTIONS = ["What is a page table?", "Who was Ada Lovelace?", "Why is the sky blue?"]

if len(sys.argv) > 2:
    sys.exit(__doc__)
model, tokenizer = load_model(*sys.argv[1:])
factory = PagedCacheFactory(model, max_bytes="4GB")

prompts = [question_tokens(tokenizer, question, SYSTEM) for question in QUESTIONS]
alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
system = [tokens[0] for tokens in alike]  # up to where the questions part
cache, _ = factory.fetch_cache(system)
generate(model, tokenizer, system, prompt_cache=cache, max_tokens=1)
factory.insert_cache(system, cache)

found = [factory.fetch_cache(prompt) for prompt in prompts]
rests = [prompt[cached:] for prompt, (_, cached) in zip(prompts, found, strict=True)]
caches = [cache for cache, _ in found]
answers = batch_generate(model, tokenizer, rests, prompt_caches=caches, max_tokens=40)
for question, (_, cached), answer in zip(QUESTIONS, found, answers.texts, strict=True):
    print(f"{question} ({cached} tokens were cached)\n{answer}\n")
