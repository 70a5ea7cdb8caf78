"""The command `paged-kv generate`: generates text with mlx-lm on paged caches."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from typing import Any

from tqdm import tqdm

from paged_kv.allocator.errors import PagedKVError, PoolExhausted
from paged_kv.commands.arguments import name, positive, seed, temperature
from paged_kv.commands.cache_options import (
    add_cache_options,
    add_dtype_option,
    examples,
    require_complete,
    require_folders,
    store_options,
)
from paged_kv.commands.interrupts import raised
from paged_kv.commands.model_names import named_model
from paged_kv.embedded import embedded_model
from paged_kv.extras import extra_module

# Shorter prompts are read too quickly for a progress bar.
_LONG_PROMPT = 512
_NAME_LENGTH = 60


def add_generate_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="generate text on paged caches",
        description="Generate text with mlx-lm on paged caches. Text goes to standard output, "
        "everything else to standard error.",
        **examples(
            'paged-kv generate --prompt "def read_file(path):"',
            "cat question.txt | paged-kv generate --model mlx-community/Llama-3.2-1B-Instruct-4bit",
            'paged-kv generate --model MODEL --prompt "A name for a cat:" --num-samples 4',
            "paged-kv generate --model MODEL --prompt - --page-format q4 --store <long.txt",
            "paged-kv generate --model MODEL --prompt - --draft-model ngram <edit.txt",
            'paged-kv generate --model VISION_MODEL --image cat.png --prompt "What is this?"',
        ),
    )
    parser.add_argument(
        "--model",
        type=name,
        help="folder or Hugging Face repository of a model (default: stdlib-llama, a small model "
        "in this package, which writes text that looks like Python)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        help="the prompt, or - for standard input; several prompts are generated as one batch "
        "(default: standard input)",
    )
    parser.add_argument(
        "--image",
        action="append",
        help="a file or an address of an image that the prompt is about, for a --model of mlx-vlm; "
        "may be repeated (needs the extra vlm)",
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
        help="samples for each prompt, which share its pages (default: 1)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=100,
        help="the most tokens to generate (default: 100)",
    )
    parser.add_argument(
        "--temp",
        type=temperature,
        help="temperature; 0 is greedy (default: 0, or 1 for several samples)",
    )
    parser.add_argument("--seed", type=seed, help="seed of the sampler")
    parser.add_argument(
        "--draft-model",
        type=name,
        help="a smaller model with the same vocabulary, or a prediction head of the model, which "
        "drafts tokens for all prompts; or head, the one that comes with the model; or auto, the "
        "same if there is one; or ngram, which drafts what followed the same tokens earlier. "
        "Nothing is drafted where it is slower (default: no drafts)",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=positive,
        default=4,
        help="with --draft-model: the most tokens to draft for a prompt in a step (default: 4)",
    )
    add_dtype_option(parser)
    add_cache_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, print a summary, return the exit status."""
    arguments.model = named_model(arguments.model)
    try:
        require_complete(arguments)
        temp = _temperature(arguments.temp, arguments.num_samples)
        _require_one_text(arguments)
        require_folders(arguments)
        prompts = [_prompt(text) for text in arguments.prompt or ["-"]]
    except ValueError as error:
        print(f"paged-kv generate: {error}", file=sys.stderr)
        return 2
    with _remedy_named():
        generation = _generation_class(arguments)(
            arguments.model or embedded_model(),
            page_format=arguments.page_format,
            read_tokens=arguments.read_tokens,
            offload=arguments.offload,
            wait_for_pages=arguments.wait_for_pages,
            max_bytes=arguments.max_kv_bytes,
            max_tokens=arguments.max_tokens,
            temp=temp,
            seed=arguments.seed,
            store=arguments.store,
            store_bytes=arguments.store_bytes,
            store_options=store_options(arguments),
            draft=arguments.draft_model,
            num_draft_tokens=arguments.num_draft_tokens,
            dtype=arguments.dtype,
        )
    # `close` writes what the store still lacks, after an interrupt too.
    interrupt = raised() if arguments.store else nullcontext()
    output = _output(is_reported=generation.is_reported)
    with interrupt, closing(generation), output, _remedy_named():
        _generate(generation, prompts, arguments)
    return 0


def _generate(generation: Any, prompts: list[str], arguments: argparse.Namespace) -> None:
    use_template = not arguments.ignore_chat_template
    if arguments.image:
        media = generation.read(prompts[0], arguments.image, use_template=use_template)
        generation.stream(media.tokens, _progress(len(media.tokens)), media)
        return
    encoded = [generation.encode(prompt, use_template=use_template) for prompt in prompts]
    if len(encoded) == arguments.num_samples == 1 and not generation.drafts:
        generation.stream(encoded[0], _progress(len(encoded[0])))
    else:
        names = [_name(number, prompt) for number, prompt in enumerate(prompts, 1)]
        generation.batch(encoded, names, arguments.num_samples)


def _name(number: int, prompt: str) -> str:
    """A prompt's number and how it begins, on one line."""
    line = " ".join(prompt.split())
    beginning = line if len(line) <= _NAME_LENGTH else f"{line[:_NAME_LENGTH]}..."
    return f"prompt {number}: {beginning}"


def _generation_class(arguments: argparse.Namespace) -> Any:
    """What generates. Imported here because loading mlx-lm takes seconds: --help and usage errors
    do not need it."""
    if arguments.image:
        module = extra_module("paged_kv.integrations.mlx_vlm.image_generation", "vlm")
        return module.ImageGeneration
    from paged_kv.integrations.generation.text_generation import TextGeneration

    return TextGeneration


def _require_one_text(arguments: argparse.Namespace) -> None:
    """Raise ValueError if an option does not work with images, or the model is missing."""
    if not arguments.image:
        return
    if arguments.model is None:
        raise ValueError("--image needs a --model of mlx-vlm: the one in this package reads text")
    others = {
        "--num-samples": arguments.num_samples > 1,
        "several --prompt": len(arguments.prompt or []) > 1,
        "--draft-model": arguments.draft_model is not None,
    }
    if used := [option for option, is_used in others.items() if is_used]:
        raise ValueError(f"--image makes one text of one prompt: leave out {', '.join(used)}")


@contextmanager
def _remedy_named() -> Iterator[None]:
    """Let an exhausted pool name the options that help."""
    try:
        yield
    except PoolExhausted as error:
        raise PagedKVError(
            f"{error.shortage}: {error.remedy('--max-kv-bytes')}, or ask for less with shorter "
            "prompts, --max-tokens or --num-samples"
        ) from None


@contextmanager
def _output(*, is_reported: bool) -> Iterator[None]:
    """Where texts are printed; nowhere if another process prints the same."""
    if is_reported:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def _temperature(temperature: float | None, num_samples: int) -> float:
    """The temperature to sample with.

    Raises:
        ValueError: all samples would be equal.
    """
    if num_samples > 1 and temperature == 0:
        raise ValueError(
            f"--temp 0 makes {num_samples} equal samples: raise --temp, or leave out --num-samples"
        )
    # Several samples are wanted because they differ: 1 takes them from the model's own
    # distribution, which is also the default of vLLM.
    return float(num_samples > 1) if temperature is None else temperature


def _prompt(text: str) -> str:
    """The text of a --prompt option.

    Raises:
        ValueError: the prompt is empty, or not UTF-8.
    """
    if text == "-" and sys.stdin.isatty():
        print("paged-kv generate: type the prompt, then Ctrl-D", file=sys.stderr)
    try:
        prompt = sys.stdin.read() if text == "-" else text
        # Bytes of an argument that are not UTF-8 arrive as surrogates.
        prompt.encode()
    except UnicodeError:
        raise ValueError("a prompt is not UTF-8: give --prompt some text") from None
    if not prompt:
        raise ValueError("a prompt is empty: give --prompt some text")
    return prompt


def _progress(tokens: int) -> "_Progress | None":
    """The progress bar of a prompt, on a terminal and for long prompts only."""
    return _Progress(tokens) if tokens >= _LONG_PROMPT and sys.stderr.isatty() else None


class _Progress:
    """A progress bar for the prompt."""

    def __init__(self, tokens: int) -> None:
        self._bar = tqdm(total=tokens, unit="token", desc="prompt", leave=False)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
