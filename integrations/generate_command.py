"""`paged-kv generate`: text from a model of mlx-lm, on paged caches."""

import argparse
import sys
from importlib.resources import files

from tqdm import tqdm

from paged_kv.allocator.errors import PagedKVError, PoolExhausted
from paged_kv.commands.arguments import name, page_format, positive, seed, temperature
from paged_kv.commands.store_command import add_store_options
from paged_kv.sizes import parse_size

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
        type=name,
        help="folder or Hugging Face repository of a model; without it, a small model that comes "
        "with this package and writes what looks like Python",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        help="the prompt, or - to read standard input; several are generated as one batch",
    )
    parser.add_argument(
        "--ignore-chat-template", action="store_true", help="give the model the prompt as it is"
    )
    parser.add_argument(
        "--num-samples",
        type=positive,
        default=1,
        help="texts for each prompt, which share its pages; with --temp (default: 1)",
    )
    parser.add_argument("--max-tokens", type=positive, default=100, help="default: 100")
    parser.add_argument(
        "--temp", type=temperature, default=0.0, help="temperature (default: 0, greedy)"
    )
    parser.add_argument("--seed", type=seed, help="seed of the sampler")
    parser.add_argument(
        "--page-format",
        type=page_format,
        default="fp16",
        help="what pages hold: fp16, q8 or q4, two of these for keys and for values such as q8/q4, "
        "or auto (default: fp16)",
    )
    parser.add_argument(
        "--max-bytes", type=parse_size, help="the most memory for pages, such as 4GB"
    )
    add_store_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, and print a summary; returns the exit status."""
    try:
        prompts = [_prompt(text) for text in arguments.prompt]
    except ValueError as error:
        print(f"paged-kv generate: {error}", file=sys.stderr)
        return 2
    # Loading mlx-lm takes seconds, which --help and usage errors need not wait for.
    from paged_kv.integrations.text_generation import TextGeneration

    generation = TextGeneration(
        arguments.model or embedded_model(),
        page_format=arguments.page_format,
        max_bytes=arguments.max_bytes,
        max_tokens=arguments.max_tokens,
        temp=arguments.temp,
        seed=arguments.seed,
        store=arguments.store,
        store_bytes=arguments.store_bytes,
    )
    encoded = [
        generation.encode(prompt, use_template=not arguments.ignore_chat_template)
        for prompt in prompts
    ]
    try:
        if len(encoded) == 1 and arguments.num_samples == 1:
            generation.stream(encoded[0], _Progress(len(encoded[0])))
        else:
            generation.batch(encoded, arguments.num_samples)
    except PoolExhausted as error:
        raise PagedKVError(
            f"{error.shortage}: {error.remedy('--max-bytes')}, or ask for less with shorter "
            "prompts, --max-tokens or --num-samples"
        ) from None
    finally:
        generation.close()
    return 0


def _prompt(text: str) -> str:
    """The prompt that an option names.

    Raises:
        ValueError: it is empty, or not UTF-8.
    """
    try:
        prompt = sys.stdin.read() if text == "-" else text
        # What is not UTF-8 in an argument arrives as surrogates.
        prompt.encode()
    except UnicodeError:
        raise ValueError("a prompt is not UTF-8: give --prompt some text") from None
    if not prompt:
        raise ValueError("a prompt is empty: give --prompt some text")
    return prompt


def embedded_model() -> str:
    """The folder of the model that comes with this package."""
    return str(files("paged_kv") / "models" / "stdlib-llama")


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
