"""Generates for `paged-kv generate`: texts to standard output, a summary to standard error."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.generate_utils import BatchStats
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import sharded_load

from paged_kv.checks import counted, format_size
from paged_kv.integrations.batching.last_responses import PromptCacheTaken
from paged_kv.integrations.batching.prompt_segments import is_on_the_way
from paged_kv.integrations.distributed.connected_ranks import joined_ranks
from paged_kv.integrations.generation.options import GenerateOptions
from paged_kv.integrations.media_keys import PromptMedia
from paged_kv.integrations.samples import read_shared
from paged_kv.integrations.slow_products import warn_of_slow_products
from paged_kv.integrations.speculation.draft_models import (
    divided_factories,
    load_draft_model,
    make_draft,
)
from paged_kv.integrations.speculation.generator import SpeculativeBatchGenerator
from paged_kv.options import embedded_model, not_loaded, require_model
from paged_kv.pool.stats import PoolStats

# Of a prompt: mlx-lm's, and those behind a progress bar, which moves after each: still shorter ones
# would read the weights more often for no better bar. The longer is a multiple of the shorter, so
# that states are kept at the same tokens.
_STEP_TOKENS = 2048
_SHOWN_STEP_TOKENS = 512


class TextGeneration:
    """An mlx-lm model on paged caches, and how it samples."""

    def __init__(self, options: GenerateOptions) -> None:
        path, seed, draft = options.model or embedded_model(), options.seed, options.draft_model
        self._ranks = joined_ranks()
        if seed is None and self._ranks.size > 1:
            # Each rank samples its tokens itself.
            seed = self._ranks.broadcast("seed", secrets.randbits(32))
        if seed is not None:
            mx.random.seed(seed)
        self._model, self._tokenizer = self._loaded(path)
        draft_model = load_draft_model(draft, self._model, path, self._tokenizer)
        self._factories = divided_factories(
            [model for model in (self._model, draft_model) if model is not None],
            options.cache,
            dtype=options.dtype,
        )
        warn_of_slow_products(self._model, in_command=True)
        self._factory = self._factories[0]
        self._draft = make_draft(draft, draft_model, self._factories)
        self._num_draft_tokens = options.num_draft_tokens
        self._max_tokens = options.max_tokens
        self._sampler = make_sampler(temp=options.temperature)

    @property
    def is_reported(self) -> bool:
        """Whether this process prints the texts: rank 0 does so for all."""
        return self._ranks.rank == 0

    def encode(self, prompt: str, *, use_template: bool) -> list[int]:
        """The prompt's tokens, as `mlx_lm.generate` makes them.

        Raises:
            ValueError: the prompt has no tokens.
        """
        tokenizer: Any = self._tokenizer
        text, has_template = prompt, use_template and tokenizer.has_chat_template
        if has_template:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        options = {"add_special_tokens": False} if has_template else {}
        tokens = list(tokenizer.encode(text, **options))
        if not tokens:
            raise ValueError(f"the tokenizer makes no tokens of {prompt!r}: give --prompt a text")
        return tokens

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted, which only `batch` does."""
        return self._draft is not None

    def stream(
        self,
        prompt: list[int],
        progress: Callable[[int, int], None] | None,
        media: PromptMedia | None = None,
    ) -> None:
        """Print one text as it comes; `media` are the images of the prompt.

        Args:
            progress: is given the computed tokens of the prompt and how many there are to compute;
                None if nobody looks at it, which takes longer steps.
        """
        start = perf_counter()
        key = prompt if media is None else media.cache_key
        model, prompt_cache, cached = self._begin(key, media)
        fetched, text = perf_counter() - start, list(key)
        has_states = self._factory.prefixes.has_states
        # All ranks must take the same steps, and only one may have a terminal. Models of images may
        # compute all of a prompt in the first step.
        is_short = progress is not None and media is None and self._ranks.size == 1

        def note(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            # The same prompt resumes after its last token but one. Insert there: states, and
            # windows after a long answer, cannot be rolled back to it. Other prompts resume from
            # states on the way.
            held = len(key) - total + done
            is_kept = done == total - 1 or (has_states and is_on_the_way(held))
            if 0 < done < total and is_kept:
                self._factory.insert_cache(key[:held], prompt_cache)

        for response in stream_generate(
            model,
            self._tokenizer,
            prompt[cached:],
            max_tokens=self._max_tokens,
            sampler=self._sampler,
            prompt_cache=prompt_cache,
            prompt_progress_callback=note,
            prefill_step_size=_SHOWN_STEP_TOKENS if is_short else _STEP_TOKENS,
        ):
            print(response.text, end="", flush=True)
            text.append(response.token)
        print()
        finish_steps()
        # The time and not a rate: of a cached prompt a token is computed, and that looks slow.
        read = fetched + response.prompt_tokens / response.prompt_tps
        known = f", {cached} of them cached" if cached else ""
        self._summarise(f"{counted(len(prompt), 'token')} in {read:.2f} s{known}", response)
        self._factory.insert_cache(text, prompt_cache)

    def _begin(self, key: list[int], media: PromptMedia | None) -> tuple[Any, list[Any], int]:
        """What computes a prompt, its cache, and the tokens that this holds."""
        prompt_cache, cached = self._factory.fetch_cache(key)
        if media is None:
            return self._model, prompt_cache, cached
        steps = media.begin(self._model, cached)
        if steps.start < cached:
            prompt_cache = self._factory.make_cache()
        return steps, prompt_cache, steps.start

    def batch(self, prompts: list[list[int]], names: list[str], num_samples: int) -> None:
        """Print `num_samples` texts for each of several prompts, one after the other as they come.

        All prompts are one batch, or all samples of a prompt. `names` are what prompts are called
        in the titles of several texts.
        """
        figures = BatchStats()
        with self._factory:
            if num_samples == 1:
                texts = TextsInTurn(self._tokenizer, names)
                held = self._print_batch(prompts, None, texts, figures)
                for tokens, response in zip(prompts, held, strict=True):
                    with suppress(PromptCacheTaken):
                        self._factory.insert_cache(tokens, response.prompt_cache)
            else:
                # Held until the summary has counted their pages.
                held = [
                    response
                    for name, prompt in zip(names, prompts, strict=True)
                    for response in self._samples(prompt, name, num_samples, figures)
                ]
        finish_steps()
        self._summarise(counted(sum(map(len, prompts)), "token"), figures)

    def _samples(self, prompt: list[int], name: str, count: int, figures: BatchStats) -> list[Any]:
        """Print samples of one prompt, which share its pages."""
        prompt_cache, cached = self._factory.fetch_cache(prompt)
        read_shared(self._model, prompt[cached:], prompt_cache)
        titles = [f"sample {number + 1} of {name}" for number in range(count)]
        # A batch forks its caches, so all samples can be given the same one.
        held = self._print_batch(
            [prompt[-1:]] * count,
            [prompt_cache] * count,
            TextsInTurn(self._tokenizer, titles),
            figures,
        )
        self._factory.insert_cache(prompt[:-1], prompt_cache)
        return held

    def _print_batch(
        self,
        prompts: list[list[int]],
        caches: list[list[Any]] | None,
        texts: TextsInTurn,
        figures: BatchStats,
    ) -> list[Any]:
        """Generate and print one text for each prompt, and add up figures. Returns the last
        responses, whose pages stay in use unless later texts need them."""
        options: dict[str, Any] = {
            "stop_tokens": [[token] for token in self._tokenizer.eos_token_ids],
            "max_tokens": self._max_tokens,
            "sampler": self._sampler,
        }
        if self._draft is None:
            generator = BatchGenerator(self._model, **options)
        else:
            generator = SpeculativeBatchGenerator(
                self._model, self._draft, num_draft_tokens=self._num_draft_tokens, **options
            )
        numbers = {uid: at for at, uid in enumerate(generator.insert(prompts, caches=caches))}
        last: dict[int, Any] = {}
        with closing(generator), generator.stats() as stats:
            while responses := generator.next_generated():
                for each in responses:
                    number = numbers[each.uid]
                    if each.finish_reason != "stop":
                        texts.add(number, each.token)
                    if each.finish_reason is not None:
                        texts.end(number)
                        last[number] = each
        figures += stats
        return [last[number] for number in range(len(prompts))]

    def _loaded(self, path_or_repo: str) -> tuple[Any, Any]:
        return loaded(path_or_repo)

    def close(self) -> None:
        """Write pending pages to the store, and free the memory."""
        for factory in self._factories:
            factory.close()

    def _summarise(self, prompt: str, figures: Any) -> None:
        """Print speeds of a `GenerationResponse` or `BatchStats`, and the statistics of pages."""
        ranks = self._ranks
        if ranks.size > 1:
            print(f"rank        {ranks.rank} of {ranks.size}", file=sys.stderr)
        lines = summary(prompt, figures, self._factory.stats(), drafts=self.drafts)
        print(lines, file=sys.stderr)


def finish_steps() -> None:
    """Wait for the step that mlx-lm computes ahead, and that nobody reads. If a rank ended before
    it, MLX would close the connection under the step's exchanges, and might crash."""
    mx.synchronize(generation_stream)


def loaded(path_or_repo: str, load_model: Callable[[str], Any] | None = None) -> tuple[Any, Any]:
    """A model, or this rank's shard of it, and its tokenizer.

    Args:
        path_or_repo: its folder or repository.
        load_model: of another library than mlx-lm.

    Raises:
        ValueError: the model cannot be loaded; the message says why.
    """
    require_model("--model", path_or_repo)
    try:
        if load_model is None:
            load_model = load if mx.distributed.init().size() == 1 else sharded_load
        model, tokenizer = load_model(path_or_repo)[:2]
    except Exception as error:
        raise not_loaded("--model", path_or_repo, error) from error
    # transformers would warn of "indexing errors" in long texts; MLX's models have none.
    tokenizer.model_max_length = 1 << 60
    return model, tokenizer


def summary(prompt: str, figures: Any, stats: PoolStats, *, drafts: bool = False) -> str:
    """Speeds of a `GenerationResponse`, `GenerationResult` or `BatchStats`, and the statistics of
    pages."""
    drafted = counted(stats.draft_tokens, "token")
    accepted = f"drafts      {stats.accepted_tokens:,} of {drafted} accepted\n"
    return (
        f"prompt      {prompt}\n"
        f"generation  {counted(figures.generation_tokens, 'token')}, "
        f"{figures.generation_tps:.1f} tokens/s\n"
        f"pages       {counted(stats.blocks_used, 'block')} in use, "
        f"{stats.blocks_shared} of them shared, "
        f"{stats.blocks_free} free; {format_size(stats.bytes_active)} of "
        f"{format_size(stats.bytes_held)} held, {format_size(stats.bytes_budget)} allowed\n"
        f"{accepted if drafts else ''}"
        f"peak memory {format_size(int(figures.peak_memory * 1e9))}"
    )


class TextsInTurn:
    """Texts whose tokens come in any order, on standard output in the order of their titles. A
    single text is printed without its title."""

    def __init__(self, tokenizer: Any, titles: Sequence[str]) -> None:
        self._titles = titles
        self._detokenizers = [tokenizer.detokenizer for _ in titles]  # a new one each time
        self._complete = [False] * len(titles)
        self._turn = 0
        self._print_title()

    def add(self, number: int, token: int) -> None:
        self._detokenizers[number].add_token(token)
        if number == self._turn:
            self._print_new()

    def end(self, number: int) -> None:
        self._detokenizers[number].finalize()
        self._complete[number] = True
        while self._turn < len(self._titles) and self._complete[self._turn]:
            self._print_new()
            print(end="\n\n" if len(self._titles) > 1 else "\n")
            self._turn += 1
            if self._turn < len(self._titles):
                self._print_title()
                self._print_new()

    def _print_title(self) -> None:
        if len(self._titles) > 1:
            print(f"==> {self._titles[self._turn]} <==", flush=True)

    def _print_new(self) -> None:
        print(self._detokenizers[self._turn].last_segment, end="", flush=True)
