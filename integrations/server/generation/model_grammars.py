"""The grammars that are compiled for a loaded model."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

from paged_kv.extras import extra_module
from paged_kv.integrations.grammar.compiled_grammar import CompiledGrammar
from paged_kv.integrations.grammar.constraints import Constraint
from paged_kv.integrations.grammar.grammars import Grammar, GrammarError
from paged_kv.integrations.server.http.api_errors import wrong_value

_MOST_KNOWN = 64
# A character of a schema becomes some hundred bytes.
_MOST_KNOWN_CHARACTERS = 1 << 20


class ModelGrammars:
    """Compiles grammars for one tokenizer, and keeps the latest. Any thread may use it.

    Args:
        tokenizer: mlx-lm's.
        vocab_size: the number of the model's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Any = None
        self._lock = Lock()
        self._known: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def compiled(self, constraint: Constraint) -> CompiledGrammar:
        """The compiled grammar of a constraint. A new one takes milliseconds to a second.

        Raises:
            APIError: 400, it does not compile, or the extra `structured` is not installed.
        """
        with self._lock:
            found = self._known.get(constraint.grammar)
            if found is None:
                found = self._compile(constraint)
                self._keep(constraint.grammar, found)
            self._known.move_to_end(constraint.grammar)
            return found

    def made(self, compiled: CompiledGrammar) -> bool:
        """Whether a grammar was compiled for this tokenizer."""
        return self._vocabulary is not None and compiled.tokens is self._vocabulary.tokens

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            if self._vocabulary is None:
                library: Any = extra_module(_LIBRARY, "structured")
                self._vocabulary = library.Vocabulary(self._tokenizer, self._vocab_size)
            compiled: CompiledGrammar = self._vocabulary.compiled(constraint.grammar)
        except (GrammarError, ValueError) as error:
            raise wrong_value(f"{constraint.field}: {error}", constraint.field) from error
        return compiled

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._known[grammar] = compiled
        while len(self._known) > 1 and (
            len(self._known) > _MOST_KNOWN
            or sum(len(each.text) for each in self._known) > _MOST_KNOWN_CHARACTERS
        ):
            self._known.popitem(last=False)


_LIBRARY = "paged_kv.integrations.grammar.vocabulary"
