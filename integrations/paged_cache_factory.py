"""Makes paged prompt caches for an mlx-lm model."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from mlx.nn.layers.base import Module

from paged_kv.allocator.prefixes.prefix_node import Owner
from paged_kv.cache.paged_kv_cache import PagedChunkedKVCache, PagedKVCache
from paged_kv.checks import TokenIds, counted, require_hashable, size_in_bytes, whole_number
from paged_kv.integrations.batching.prompt_caches import paged_caches, unpaged_caches, with_unpaged
from paged_kv.integrations.cache_library import model_file
from paged_kv.integrations.cache_options import CACHE_OPTIONS, CacheKeywords, CacheOptions
from paged_kv.integrations.distributed.sharded_model import folder_of_rank
from paged_kv.integrations.heads.prediction_head import PredictionHead
from paged_kv.integrations.media_keys import Media, MediaKeys
from paged_kv.integrations.mlx_lm_internals import let_load
from paged_kv.integrations.paged_model import PagedModel
from paged_kv.integrations.prompt_cache_hook import install_factory, uninstall_factory
from paged_kv.integrations.states.counted_states import continued, only_sequence
from paged_kv.integrations.stored_pages import can_pack, pack, page_identity, unpack
from paged_kv.integrations.trials import require_fixed_steps, require_possible, require_trusted
from paged_kv.integrations.working_memory import WorkingMemory, automatic_budget, working_memory
from paged_kv.kernels.pages.errors import warn_once
from paged_kv.pool.options import AUTO, FormatChoice
from paged_kv.pool.stats import PoolStats
from paged_kv.prefix.keeping import inner_salt, store_policy_of
from paged_kv.prefix.prefix_cache import Expected, PrefixCache
from paged_kv.prefix.stored_prefixes import StoredPrefixes
from paged_kv.steps.batch import Batch
from paged_kv.store.keys import Wanted
from paged_kv.store.options import Address, store_addresses
from paged_kv.store.tiered_store import TieredStore, open_tiers
from paged_kv.trace import request_recorder

logger = logging.getLogger("paged_kv")

for _each in (PagedKVCache, PagedChunkedKVCache):
    let_load(_each)


class PagedCacheFactory:
    """Makes prompt caches whose keys and values are pages of one pool.

    Args:
        model: a model of mlx-lm; or of mlx-vlm, as a whole or its language model.
        options: how caches keep their pages.
        head: a prediction head of the model, from `load_head`: its keys and values are one more
            layer of the model's pages, and `HeadDraft` drafts with it. None for none.
        processor: mlx-vlm's processor of the model. Its settings tell images of cached prompts
            apart that would be equal otherwise; without it, use one processor for a factory.
        keywords: the options of `CacheOptions`, such as `max_bytes`, where they differ from
            `options`.

    Threads may share a factory, each with prompt caches of its own: one thread at a time writes a
    layer or attends to it. A write that would change a page which another thread still reads lazily
    raises `ThreadConflict`; it has no effect and can be retried.

    Attributes:
        pool: holds the pages.
        prefixes: the prefix cache.
        num_caches: the length of a prompt cache.
        ranks: the processes that share the model, if it is sharded.
        recorder: records the requests of batches, if PAGED_KV_TRACE names a file.
        recordings: the recorded steps of each pool, if steps are compiled.
        prompt_step: the most tokens of a prompt step, such as mlx-lm's `prefill_step_size`, for
            which `max_bytes` "auto" leaves memory; None with any other.
        decode_share: the share of the time that the answers of a `BatchGenerator` have a right to
            beside a prompt, from 0 to less than 1, while short prompts come before long ones; None
            for mlx-lm's order. A generator asks for it at its first prompt.
        store: the store on disk, if there is one; `store.stats()` returns its counts.

    Raises:
        TypeError: an argument is of the wrong type; the message says which.
        ValueError: an argument is out of its range; the message says which.
        OSError: the file that PAGED_KV_TRACE names cannot be written, or is not empty; or the
            folder for offloaded pages cannot be written (`OffloadError`).
        StoreError: the folder cannot be used; the message says why.
        NotReproducible: `reproducible` is given and not possible; the message says why.
        MLXLMChanged: mlx-lm is of a version that was not tested, and does not work with pages.

    Example:
        >>> factory = PagedCacheFactory(model, max_bytes=4 * 2**30)
        >>> generate(model, tokenizer, prompt, prompt_cache=factory.make_cache())
        >>> with factory:  # mlx-lm's functions then make paged caches for this model
        ...     batch_generate(model, tokenizer, prompts)
    """

    def __init__(
        self,
        model: Module,
        options: CacheOptions = CACHE_OPTIONS,
        *,
        processor: Any = None,
        head: PredictionHead | None = None,
        **keywords: Unpack[CacheKeywords],
    ) -> None:
        require_trusted(partial(PagedCacheFactory, max_bytes="64MB"))
        options = replace(options, **keywords)
        self._media = MediaKeys(model, processor)
        self.prompt_step: int | None = None
        self.decode_share: float | None = None
        if options.max_bytes == AUTO:
            measure = partial(measured_step, model, options.page_format, options.write_chunk)
            max_bytes, self.prompt_step = automatic_budget(model, measure)
            options = replace(options, max_bytes=max_bytes)
        self._model = PagedModel(model, options, head)
        tiers = [] if options.store is None else store_addresses(options.store)
        self.recordings = self._model.recordings
        self._closed = False
        self._installed_on_entry: list[bool] = []
        self.pool = self._model.pool
        self.pool.ranks = self.ranks = self._model.ranks
        # All ranks serve the same requests.
        self.recorder = request_recorder() if self.ranks.rank == 0 else None
        changes_nothing = "%s changes nothing: no layer of %s keeps keys and values of all tokens"
        if options.read_tokens is not None and not self.pool.chooses:
            logger.warning(changes_nothing, "read_tokens", self.pool.name)
        if options.offload is not None and self.pool.offloading is None:
            logger.warning(changes_nothing, "offload", self.pool.name)
        layers = self._model.new_cache(self.pool)
        if options.reproducible:
            require_possible(options, self.pool, layers, self.ranks.size)
            require_fixed_steps(model, options)
        self.num_caches = len(layers)
        has_states = bool(unpaged_caches(layers))
        self._model.replace_calls()
        self.prefixes = PrefixCache(self.pool, has_states=has_states, ranks=self.ranks)
        self.store: TieredStore | None = None
        self._stored: StoredPrefixes | None = None
        if tiers:
            self._put_store_below(tiers, options)

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]:
        """A prompt cache for one sequence: what mlx-lm's `make_prompt_cache` returns, with a
        `PagedKVCache` in the place of every `KVCache`, `RotatingKVCache` and `ChunkedKVCache`.

        Layers without keys and values keep mlx-lm's caches. With `max_kv_size`, every layer holds
        so many tokens, as in mlx-lm: 4 sink tokens plus the most recent tokens. Models that make
        their own caches, such as Llama, ignore it, as in mlx-lm.

        Raises:
            TypeError: `max_kv_size` is not an integer.
            ValueError: `max_kv_size` is less than 5 and not ignored.
            RuntimeError: the factory was closed.
            PoolExhausted: `max_bytes` does not hold a page of every layer; it names how much does.
        """
        self._require_open()
        self._model.try_out()
        bound = _used_bound(self._model.module, max_kv_size)
        if self.pool.windows:
            # The pool caches out-of-window blocks only once it knows the sizes of all groups.
            self._model.open_layers(self.pool)
        pool = self._model.pool_for(bound)
        if pool.is_reproducible:
            self._model.open_layers(pool)  # how steps are cut depends on them
        return self._model.new_cache(pool, bound)

    def fetch_cache(
        self, tokens: TokenIds, *, salt: Hashable = None, **media: Unpack[Media]
    ) -> tuple[list[Any], int]:
        """A prompt cache that holds the longest cached prefix of a prompt, and its length in
        tokens. At least the last token is left to compute.

        `tokens` are signed 64-bit integers, in a sequence or a one-dimensional array.

        Sequences share pages, and copy one when they write to it. Only prompts inserted with the
        same `salt` can hit: give each user one, and add to it anything else that the results depend
        on. `Unstored(salt)` keeps a prompt out of the store. Give what `tokens` have placeholders
        for as `images`, `audio` and `videos`, in the order of the prompt: only prompts with equal
        ones share what follows.

        Example:
            >>> cache, cached = factory.fetch_cache(tokens)
            >>> generate(model, tokenizer, tokens[cached:], prompt_cache=cache)
            >>> factory.insert_cache(tokens, cache)

        Raises:
            TypeError, ValueError: `tokens` are not token ids, or `salt` is not hashable; or the
                media are not those of the prompt, see `Media`.
            RuntimeError: the factory was closed.
        """
        known = self._media.keyed(tokens, media)
        prompt_cache = self.make_cache()
        page_format, version = self.pool.page_format, self._model.version.number
        namespace = self._namespace(salt, version)
        prefix = self.prefixes.fetch(namespace, known, page_format, policy=store_policy_of(salt))
        prefix.sequence.model_version = version
        for cache in paged_caches(prompt_cache):
            cache.batch = Batch.of(cache.pool, [prefix.sequence])
        if prefix.states is not None:
            prompt_cache = continued(with_unpaged(prompt_cache, prefix.states), self.pool, version)
        return prompt_cache, prefix.num_tokens

    def peek(self, tokens: list[int], *, salt: Hashable = None) -> Expected:
        """What `fetch_cache` would find in memory now; nothing counts as used."""
        return self.prefixes.peek(self._namespace(salt), tokens)

    def has_room(self, tokens: list[int], *, salt: Hashable = None) -> bool:
        """Whether what is not cached of a prompt fits into memory that is free, or that holds what
        the eviction policy gives up before a new prompt."""
        return self.prefixes.has_room(self._namespace(salt), tokens)

    def parting(self, tokens: list[int], *, salt: Hashable = None) -> int:
        """After how many tokens of a prompt it is worth an `insert_cache`, beside its end: where it
        parts from cached ones, if the model has states and none is cached there; 0 if nowhere."""
        return self.prefixes.parting(self._namespace(salt), tokens)

    def insert_cache(
        self,
        tokens: TokenIds,
        prompt_cache: list[Any],
        *,
        salt: Hashable = None,
        session: Hashable = None,
        **media: Unpack[Media],
    ) -> int:
        """Let `fetch_cache` reuse what a prompt cache of one sequence holds of these tokens;
        returns how many of them a longer prompt can reuse. It copies nothing. The cache stays
        usable, and can also be inserted under another salt: then both salts hit.

        The pages stay until they are evicted, `clear()`, `forget` of these tokens, or `end_session`
        of the `session` that the prompt is named to be part of. Of recurrent layers, and of models
        without pages, it keeps a snapshot: prompts resume at the cache's end or, if it went on
        behind these tokens, where its last step of several tokens ended.

        Raises:
            TypeError: `tokens` are not token ids, `prompt_cache` is not a list, or `salt` or
                `session` is not hashable.
            ValueError: the cache holds several sequences, or is not of this factory; or the media
                are not those of the prompt.
        """
        known, owner = self._media.keyed(tokens, media), _owner(salt, session)
        sequence = only_sequence(prompt_cache, self.pool, self.num_caches)
        if sequence.model_version is None:
            warn_once(
                "insert_cache keeps nothing of this prompt cache: another model, or one that has "
                "changed since, computed its tokens, or nobody knows which. Insert caches of "
                f"{self.pool.name} before it is changed, and begin new ones afterwards"
            )
            return 0
        namespace = self._namespace(salt, sequence.model_version, sequence.page_format.name)
        states, policy = unpaged_caches(prompt_cache), store_policy_of(salt)
        kept = self.prefixes.insert(namespace, known, sequence, states, policy=policy, owner=owner)
        if states and len(known) and not kept and not self.pool.is_reproducible:
            warn_once(
                f"insert_cache keeps nothing of {counted(len(known), 'token')}: the recurrent "
                f"layers of {self.pool.name} go on only where their states are known, and this "
                f"cache holds those after {counted(sequence.length, 'token')}. Insert it right "
                "after the prompt, or with all its tokens"
            )
        return kept

    def forget(self, tokens: TokenIds, *, salt: Hashable = None, **media: Unpack[Media]) -> int:
        """Evict what only this cached prompt and its prefixes use; returns how many blocks' worth
        of tokens that was, which may be 0.

        What stays: what other prompts begin with too, what is pinned or held, and prompts of
        sessions. Sequences that use the pages keep them, and pages on disk stay.

        Raises:
            TypeError: `tokens` are not token ids, or `salt` is not hashable.
            ValueError: the media are not those of the prompt.
        """
        return self.prefixes.forget(self._namespace(salt), self._media.keyed(tokens, media))

    def end_session(self, session: Hashable, *, salt: Hashable = None) -> int:
        """Evict what only prompts use that were inserted with this `session` and `salt`; returns
        how many blocks' worth of tokens that was, which may be 0.

        What stays is as for `forget`. Of the 4,096 sessions used last the factory knows the
        prompts; those of others stay until they are evicted.

        Raises:
            UnknownSession: no prompt was inserted with it, or it has been ended or forgotten since.
                The call has no effect then.
            TypeError: `session` or `salt` is not hashable.
        """
        return self.prefixes.end_session(_owner(salt, session))

    def wanted_blocks(self, tokens: TokenIds, *, salt: Hashable = None) -> Wanted | None:
        """What `fetch_cache` would look up of a prompt in the store; None if nothing."""
        namespace, known = self._namespace(salt), self._media.keyed(tokens, {})
        return None if self._stored is None else self._stored.wanted(namespace, known)

    def pin(self, tokens: TokenIds, *, salt: Hashable = None, **media: Unpack[Media]) -> int:
        """Do not evict the cached prefix of a prompt until `unpin`; returns its length in tokens,
        which may be 0. Blocks inserted later are not pinned. Pins nest.

        Raises:
            TypeError: `tokens` are not token ids, or `salt` is not hashable.
        """
        known = self._media.keyed(tokens, media)
        return self.pool.index.pin(salt, self._namespace(salt), known)

    def unpin(self, tokens: TokenIds, *, salt: Hashable = None, **media: Unpack[Media]) -> int:
        """Undo the latest `pin` of the same tokens and salt, also if more was inserted since;
        returns how many tokens that `pin` returned.

        Raises:
            NotPinned: there is no such pin. The call has no effect then.
            TypeError: as for `pin`.
        """
        require_hashable("salt", salt)
        return self.pool.index.holds.unpin(salt, self._media.keyed(tokens, media))

    def hold(self, tokens: list[int], *, until: float, most: float, salt: Hashable = None) -> None:
        """Keep the cached prefix of a prompt until a time by the clock of `Holds.expire`. Until
        then it is evicted only when nothing else is left to evict.

        All that is held takes at most a share `most` of the memory, and at most half of that under
        one salt."""
        self.prefixes.hold(self._namespace(salt), tokens, until, most)

    def install(self, *, keep_prompts: bool = False) -> bool:
        """Let mlx-lm make paged caches for this model wherever it is given none; false if this was
        installed already.

        With `keep_prompts`, prompts of `generate`, `batch_generate` and `BatchGenerator` that are
        given no cache are inserted, without a salt, and start from what is cached.

        Other models are not affected. `with factory:` installs it, and restores the earlier state
        at the end.

        Raises:
            ValueError: another factory is installed for this model.
            RuntimeError: the factory was closed.
        """
        self._require_open()
        hooks = self._model.library.hooks
        return install_factory(self._model.module, self, hooks, keep_prompts=keep_prompts)

    def uninstall(self) -> None:
        """Undo `install()`; existing caches keep working."""
        uninstall_factory(self._model.module, self)

    def __enter__(self) -> PagedCacheFactory:
        self._installed_on_entry.append(self.install())
        return self

    def __exit__(self, *exception: object) -> None:
        if self._installed_on_entry.pop():
            self.uninstall()

    def can_admit(self, tokens: int) -> bool:
        """Whether a new sequence of `tokens` tokens would fit in the pool now.

        Raises:
            TypeError: `tokens` is not an integer: pass a number of tokens, not their ids.
            ValueError: `tokens` is negative.
        """
        tokens = whole_number("tokens", tokens, least=0)
        self._model.open_layers(self.pool)
        return self.pool.can_admit(tokens)

    def stats(self) -> PoolStats:
        """A snapshot of the statistics of all the factory's pools."""
        with self.pool.lock:  # all of them share it
            first, *others = [pool.stats() for pool in self._model.pools.values()]
        return sum(others, first)

    def clear(self) -> None:
        """Evict all prompts that are not pinned, and free all memory that no sequence uses. Pages
        on disk stay, and still hit."""
        for pool in list(self._model.pools.values()):
            pool.clear()

    def close(self) -> None:
        """Uninstall, make no more caches, and free all memory that no sequence uses. If there is a
        store, this first waits until what was inserted is written.

        Existing caches keep working, and free their pages when they are dropped. With the last of
        them, the model's modules are again as they were before.
        """
        self._closed = True
        self.uninstall()
        self._model.close()
        if self.store is not None:
            self.store.close()
        self.clear()

    def _put_store_below(self, tiers: list[Address], options: CacheOptions) -> None:
        states = unpaged_caches(self._model.new_cache(self.pool))
        if not can_pack(states):
            kinds = ", ".join(sorted({type(state).__name__ for state in states}))
            raise ValueError(f"a store cannot hold this model's caches without pages: {kinds}")
        ours = [folder_of_rank(each, self.ranks) for each in tiers]
        most = size_in_bytes("store_bytes", options.store_bytes)
        self.store = open_tiers(ours, most, options.store_options)
        self.pool.counts.of_store = self.store.counts_by_tier
        self._model.open_layers(self.pool)
        model = self._model
        identify = page_identity(model.version, self.pool, model.file, model.library.name)
        self._stored = StoredPrefixes(
            self.prefixes, self.store, identify, pack, unpack, options.store_options
        )
        self.prefixes.lower = self._stored

    def _namespace(
        self, salt: Hashable, version: int | None = None, page_format: str | None = None
    ) -> Hashable:
        """Everything besides the tokens that the content of pages depends on. None means what the
        model and the pool have now."""
        require_hashable("salt", salt)
        number = self._model.version.number if version is None else version
        return number, page_format or self.pool.page_format.name, inner_salt(salt)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this factory was closed: make a new PagedCacheFactory(model)")


def _owner(salt: Hashable, session: Hashable) -> Owner:
    require_hashable("salt", salt)
    require_hashable("session", session)
    return Owner(inner_salt(salt), session)


def _used_bound(model: Module, max_kv_size: int | None) -> int | None:
    """`max_kv_size` if mlx-lm's `make_prompt_cache` would use it, else None. It ignores the bound
    for models with a `make_cache` of their own.

    Raises:
        TypeError, ValueError: `max_kv_size` is not an integer, or negative.
    """
    if max_kv_size is None:
        return None
    bound = whole_number("max_kv_size", max_kv_size, least=0)
    if not hasattr(model, "make_cache"):
        return bound
    warn_once(
        f"max_kv_size is ignored for {model_file(model)}, as in mlx-lm: the model makes its own "
        "caches. max_bytes bounds the memory of all caches"
    )
    return None


def measured_step(
    model: Module, page_format: FormatChoice = "fp16", write_chunk: int | None = None
) -> WorkingMemory:
    """What a prompt step takes, measured on pages of a factory that is closed then. The other
    arguments are the factory's."""
    factory = PagedCacheFactory(
        model, page_format=page_format, write_chunk=write_chunk, compile=False
    )
    with closing(factory):
        return working_memory(model, factory.make_cache)
