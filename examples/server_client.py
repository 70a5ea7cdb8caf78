"""Asks a running server with the openai package (pip install openai).

    paged-kv server --model MODEL --max-kv-bytes 4GB
    python examples/server_client.py

The same with curl:

    curl http://127.0.0.1:8080/v1/chat/completions \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'
"""

import sys

from openai import APIConnectionError, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
client = OpenAI(base_url=url, api_key="none")
messages = [{"role": "user", "content": "Name three uses of a page table."}]
try:
    stream = client.chat.completions.create(
        model="default_model",
        messages=messages,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
        # Only requests with the same salt share cached prompts.
        extra_body={"cache_salt": "alice"},
    )
except APIConnectionError:
    sys.exit(f"no server answers at {url}\n\n{__doc__}")
for part in stream:
    for choice in part.choices:
        print(choice.delta.content or "", end="", flush=True)
    if part.usage:
        print(f"\n{part.usage.prompt_tokens} prompt tokens, {part.usage.prompt_tokens_details}")
