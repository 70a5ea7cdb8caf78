"""The grammars that are compiled for a loaded model."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import Any

from paged_kv.integrations.grammar.constraints import Constraint
from paged_kv.integrations.grammar.grammars import Grammar
from paged_kv.integrations.grammar.vocabulary import CompiledGrammar, Vocabulary
from paged_kv.lru import LRU
from paged_kv.server.http.api_errors import APIError, wrong_value

# A character of a schema becomes some hundred bytes. At most 64 grammars are kept.
_MOST_CHARACTERS, _LEAST_COUNTED = 1 << 20, 1 << 14


class ModelGrammars:
    """Compiles grammars for one tokenizer, and keeps the latest. Any thread may use it.

    Args:
        tokenizer: mlx-lm's.
        vocab_size: the number of the model's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = Lock()
        self._lock = Lock()
        self._known: LRU[Grammar, Future[CompiledGrammar]] = LRU(
            _MOST_CHARACTERS, lambda grammar, _: max(len(grammar.text), _LEAST_COUNTED)
        )

    def compiled(self, constraint: Constraint) -> CompiledGrammar:
        """The compiled grammar of a constraint. A new one takes milliseconds to a second, for which
        only those wait that ask for it.

        Raises:
            APIError: 400, it does not compile, or the extra `structured` is not installed.
        """
        grammar = constraint.grammar
        with self._lock:
            future, is_new = self._known.use(grammar), grammar not in self._known
            if future is None:
                future = self._known[grammar] = Future()
        if is_new:
            self._compile(grammar, future)
        try:
            return future.result()
        except ValueError as error:
            raise wrong_value(f"{constraint.field}: {error}", constraint.field) from error

    def begin_compiling(self, constraint: Constraint) -> None:
        """Compile a grammar on a thread, so that it is there when a request begins."""
        work = partial(self._prepared, constraint)
        Thread(target=work, name="paged-kv-grammar", daemon=True).start()

    def _prepared(self, constraint: Constraint) -> None:
        with suppress(APIError):  # which the request gets when it begins
            self.compiled(constraint)

    def made(self, compiled: CompiledGrammar) -> bool:
        """Whether a grammar was compiled for this tokenizer."""
        return self._vocabulary is not None and compiled.tokens is self._vocabulary.tokens

    def _compile(self, grammar: Grammar, future: Future[CompiledGrammar]) -> None:
        try:
            with self._vocabulary_lock:
                if self._vocabulary is None:
                    self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            future.set_result(self._vocabulary.compiled(grammar))
        except BaseException as error:
            with self._lock:
                self._known.pop(grammar, None)
            future.set_exception(error)
