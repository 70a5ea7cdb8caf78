"""Generates for `paged-kv generate --image`: a text about images, with a model of mlx-vlm."""

import sys
from typing import Any

import mlx.core as mx
from mlx_vlm import load, stream_generate
from mlx_vlm.prompt_utils import apply_chat_template

from paged_kv.integrations.generation.summary import summary
from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
from paged_kv.sizes import counted


def generate_about_images(
    path_or_repo: str,
    prompt: str,
    images: list[str],
    *,
    use_template: bool,
    page_format: str,
    max_bytes: int | None,
    max_tokens: int,
    temp: float,
    seed: int | None,
) -> None:
    """Print one text as it comes, and a summary to standard error.

    Args:
        images: files or addresses, which mlx-vlm loads.

    Raises:
        ValueError, OSError: mlx-vlm cannot load the model or an image.
        PoolExhausted: `max_bytes` does not hold the tokens.
    """
    if seed is not None:
        mx.random.seed(seed)
    model, processor = load(path_or_repo)
    factory = PagedCacheFactory(
        model, page_format=page_format, max_bytes=max_bytes, processor=processor
    )
    if use_template and getattr(processor, "chat_template", None):
        prompt = apply_chat_template(processor, model.config, prompt, num_images=len(images))
    prompt_cache = factory.make_cache()
    result: Any = None
    for result in stream_generate(
        model,
        processor,
        prompt,
        image=images,
        max_tokens=max_tokens,
        temperature=temp,
        prompt_cache=prompt_cache,
    ):
        print(result.text, end="", flush=True)
    print()
    read = f"{counted(result.prompt_tokens, 'token')}, {result.prompt_tps:.1f} tokens/s"
    print(summary(read, result, factory.stats()), file=sys.stderr)
    factory.close()
