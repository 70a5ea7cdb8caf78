"""The command `paged-kv generate`: generates text with mlx-lm on paged caches."""

import argparse
import sys
from importlib.resources import files

from tqdm import tqdm

from paged_kv.allocator.errors import PagedKVError, PoolExhausted
from paged_kv.commands.arguments import name, page_format, positive, seed, temperature
from paged_kv.commands.store_command import add_store_options
from paged_kv.sizes import parse_size

# Shorter prompts are read too quickly for a progress bar.
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
        help="folder or Hugging Face repository of a model (default: a small model in this "
        "package, which writes text that looks like Python)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        help="the prompt, or - for standard input; several prompts are generated as one batch",
    )
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="give the model the prompt without its chat template",
    )
    parser.add_argument(
        "--num-samples",
        type=positive,
        default=1,
        help="samples for each prompt, which share its pages; set --temp too (default: 1)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=100,
        help="the most tokens to generate (default: 100)",
    )
    parser.add_argument(
        "--temp", type=temperature, default=0.0, help="temperature (default: 0, greedy)"
    )
    parser.add_argument("--seed", type=seed, help="seed of the sampler")
    parser.add_argument(
        "--page-format",
        type=page_format,
        default="fp16",
        help="how pages hold numbers: fp16, q8 or q4, two of these for keys and values such as "
        "q8/q4, or auto (default: fp16)",
    )
    parser.add_argument(
        "--max-bytes", type=parse_size, help="the most memory for pages, such as 4GB"
    )
    add_store_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, print a summary, return the exit status."""
    try:
        prompts = [_prompt(text) for text in arguments.prompt]
    except ValueError as error:
        print(f"paged-kv generate: {error}", file=sys.stderr)
        return 2
    # Imported here because loading mlx-lm takes seconds: --help and usage errors do not need it.
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
    """The text of a --prompt option.

    Raises:
        ValueError: the prompt is empty, or not UTF-8.
    """
    try:
        prompt = sys.stdin.read() if text == "-" else text
        # Bytes of an argument that are not UTF-8 arrive as surrogates.
        prompt.encode()
    except UnicodeError:
        raise ValueError("a prompt is not UTF-8: give --prompt some text") from None
    if not prompt:
        raise ValueError("a prompt is empty: give --prompt some text")
    return prompt


def embedded_model() -> str:
    """The folder of the model in this package."""
    return str(files("paged_kv") / "models" / "stdlib-llama")


class _Progress:
    """A progress bar for the prompt, on a terminal and for long prompts only."""

    def __init__(self, tokens: int) -> None:
        # With None, tqdm shows the bar only if standard error is a terminal.
        disable = True if tokens < _LONG_PROMPT else None
        self._bar = tqdm(total=tokens, unit="token", desc="prompt", leave=False, disable=disable)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
