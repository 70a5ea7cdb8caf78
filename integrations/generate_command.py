"""`paged-kv generate`: text from a model of mlx-lm, on paged caches."""

import argparse
import sys
from importlib.resources import files
from typing import Any

from tqdm import tqdm

from paged_kv.sizes import format_size, parse_size

# Shorter prompts are read before anyone would look at a progress bar.
_LONG_PROMPT = 512


def add_generate_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="generate text on paged caches",
        description="Generate text with mlx-lm on paged caches. Text goes to standard output, "
        "everything else to standard error.",
    )
    parser.add_argument(
        "--model",
        help="folder or Hugging Face repository of a model; without it, a small model that comes "
        "with this package and writes what looks like Python",
    )
    parser.add_argument("--prompt", required=True, help="the prompt, or - to read standard input")
    parser.add_argument(
        "--ignore-chat-template", action="store_true", help="give the model the prompt as it is"
    )
    parser.add_argument("--max-tokens", type=_positive, default=100, help="default: 100")
    parser.add_argument("--temp", type=float, default=0.0, help="temperature (default: 0, greedy)")
    parser.add_argument("--seed", type=int, help="seed of the sampler")
    parser.add_argument("--page-format", default="fp16", help="what pages hold (default: fp16)")
    parser.add_argument(
        "--max-bytes", type=parse_size, help="the most memory for pages, such as 4GB"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, and print a summary; returns the exit status."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        print("paged-kv generate: the prompt is empty: give --prompt some text", file=sys.stderr)
        return 2
    # Loading mlx-lm takes seconds, which --help and usage errors need not wait for.
    import mlx.core as mx
    from mlx_lm import load, stream_generate
    from mlx_lm.sample_utils import make_sampler

    from paged_kv.integrations.paged_cache_factory import PagedCacheFactory

    if arguments.seed is not None:
        mx.random.seed(arguments.seed)
    loaded = load(arguments.model or embedded_model())
    model, tokenizer = loaded[0], loaded[1]
    factory = PagedCacheFactory(
        model, page_format=arguments.page_format, max_bytes=arguments.max_bytes
    )
    tokens = _encode(tokenizer, prompt, use_template=not arguments.ignore_chat_template)
    responses = stream_generate(
        model,
        tokenizer,
        tokens,
        max_tokens=arguments.max_tokens,
        sampler=make_sampler(temp=arguments.temp),
        prompt_cache=(prompt_cache := factory.make_cache()),
        prompt_progress_callback=_Progress(len(tokens)),
    )
    for response in responses:
        print(response.text, end="", flush=True)
    print()
    _print_summary(response, factory.stats())
    del prompt_cache
    return 0


def embedded_model() -> str:
    """The folder of the model that comes with this package."""
    return str(files("paged_kv") / "models" / "stdlib-llama")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a positive whole number is needed, got {text!r}")
    return int(text)


def _encode(tokenizer: Any, prompt: str, *, use_template: bool) -> list[int]:
    """The prompt's tokens, as `mlx_lm.generate` makes them."""
    if use_template and tokenizer.has_chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    return list(tokenizer.encode(prompt))


class _Progress:
    """A progress bar for the prompt, on a terminal and for long prompts only."""

    def __init__(self, tokens: int) -> None:
        # None lets tqdm look whether standard error is a terminal.
        disable = True if tokens < _LONG_PROMPT else None
        self._bar = tqdm(total=tokens, unit="token", desc="prompt", leave=False, disable=disable)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()


def _print_summary(response: Any, stats: Any) -> None:
    print(
        f"prompt      {response.prompt_tokens} tokens, {response.prompt_tps:.1f} tokens/s\n"
        f"generation  {response.generation_tokens} tokens, "
        f"{response.generation_tps:.1f} tokens/s\n"
        f"pages       {stats.blocks_used} blocks in use, {stats.blocks_free} free; "
        f"{format_size(stats.bytes_active)} of {format_size(stats.bytes_mapped)} mapped, "
        f"{format_size(stats.bytes_budget)} allowed\n"
        f"peak memory {format_size(int(response.peak_memory * 1e9))}",
        file=sys.stderr,
    )
