"""The command `paged-kv generate`: generates text with mlx-lm on paged caches."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from typing import Any

from tqdm import tqdm

from paged_kv.allocator.errors import PagedKVError, PoolExhausted
from paged_kv.commands.interrupts import raised
from paged_kv.extras import extra_module
from paged_kv.integrations.generation.options import GENERATE_OPTIONS, GenerateOptions
from paged_kv.options import add_options, examples, parsed_options

# Shorter prompts are read too quickly for a progress bar.
_LONG_PROMPT = 512
_NAME_LENGTH = 60


def add_generate_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text on paged caches",
        description="Generate text with mlx-lm on paged caches. Text goes to standard output, "
        "everything else to standard error. Without --model, stdlib-llama continues the prompt.",
        **examples(
            'paged-kv generate --prompt "def read_file(path):"',
            "cat question.txt | paged-kv generate --model mlx-community/Llama-3.2-1B-Instruct-4bit",
            'paged-kv generate --model MODEL --prompt "A name for a cat:" --num-samples 4',
            "paged-kv generate --model MODEL --prompt - --page-format q4 --store <long.txt",
            "paged-kv generate --model MODEL --prompt - --draft-model ngram <edit.txt",
            'paged-kv generate --model VISION_MODEL --image cat.png --prompt "What is this?"',
        ),
    )
    add_options(parser, GENERATE_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        options = parsed_options(arguments, GENERATE_OPTIONS)
        options.cache.require_usable()
        options.require_models()
        prompts = [_prompt(text) for text in options.prompt or ["-"]]
    except ValueError as error:
        print(f"paged-kv generate: {error}", file=sys.stderr)
        return 2
    with _remedy_named():
        generation = _generation_class(options)(options)
    # `close` writes what the store still lacks, after an interrupt too.
    interrupt = raised() if options.cache.store else nullcontext()
    output = _output(is_reported=generation.is_reported)
    with interrupt, closing(generation), output, _remedy_named():
        _generate(generation, prompts, options)
    return 0


def _generate(generation: Any, prompts: list[str], options: GenerateOptions) -> None:
    use_template = not options.ignore_chat_template
    if options.image:
        media = generation.read(prompts[0], options.image, use_template=use_template)
        generation.stream(media.tokens, _progress(len(media.tokens)), media)
        return
    encoded = [generation.encode(prompt, use_template=use_template) for prompt in prompts]
    if len(encoded) == options.num_samples == 1 and not generation.drafts:
        generation.stream(encoded[0], _progress(len(encoded[0])))
    else:
        # A prompt's number and how it begins, on one line.
        lines = [" ".join(prompt.split()) for prompt in prompts]
        names = [
            f"prompt {number}: {line[:_NAME_LENGTH]}{'...' if len(line) > _NAME_LENGTH else ''}"
            for number, line in enumerate(lines, 1)
        ]
        generation.batch(encoded, names, options.num_samples)


def _generation_class(options: GenerateOptions) -> Any:
    """What generates. Imported here because loading mlx-lm takes seconds: --help and usage errors
    do not need it."""
    if options.image:
        module = extra_module("paged_kv.integrations.mlx_vlm.image_generation", "vlm")
        return module.ImageGeneration
    from paged_kv.integrations.generation.text_generation import TextGeneration

    return TextGeneration


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


def _progress(tokens: int) -> Callable[[int, int], None] | None:
    """The progress bar of a prompt, on a terminal and for long prompts only."""
    if tokens < _LONG_PROMPT or not sys.stderr.isatty():
        return None
    bar = tqdm(total=tokens, unit="token", desc="prompt", leave=False)

    def show(done: int, total: int) -> None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show
