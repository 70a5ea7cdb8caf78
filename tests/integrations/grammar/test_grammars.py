"""Grammars in Python: a logits processor, where a grammar begins, and what a step does."""

from typing import Any

import mlx.core as mx
import pytest

from paged_kv.integrations.grammar.grammars import GrammarError, json_schema, lark, regex
from paged_kv.integrations.grammar.processor import GrammarProcessor, within_grammars
from paged_kv.integrations.grammar.vocabulary import Vocabulary


@pytest.fixture
def llama(trained: Any) -> Any:
    return trained("stdlib-llama")


@pytest.fixture
def vocabulary(llama: Any) -> Vocabulary:
    return Vocabulary(llama[1])


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    return list(vocabulary.tokens.tokenize_str(text))


def follow(grammar: Any, tokens: list[int]) -> None:
    for at, token in enumerate(tokens, grammar.taken):
        grammar.take(token, at)


def test_a_grammar_begins_after_its_trigger_wherever_tokens_end(vocabulary: Vocabulary) -> None:
    """Also where the token that ends the trigger says more."""
    compiled = vocabulary.compiled(regex("[0-9]+;"))
    (joint,) = tokens_of(vocabulary, "):")
    for said, is_masking in (("x (", False), ("x )", True), ("((", False), (")12", True)):
        grammar = compiled.begin(after=")")
        follow(grammar, tokens_of(vocabulary, said))
        assert grammar.is_masking is is_masking
    grammar = compiled.begin(after=")")
    grammar.take(joint, 0)
    assert not grammar.is_masking, "what follows the trigger does not fit, so it was no trigger"
    grammar = vocabulary.compiled(regex(":[0-9]+;")).begin(after=")")
    grammar.take(joint, 0)
    assert grammar.is_masking
    assert grammar.allowed(tokens_of(vocabulary, "7")) == 1


def _finite(logits: mx.array) -> list[int]:
    values: Any = logits[0].tolist()
    return [token for token, value in enumerate(values) if value == 0]


def test_drafts_are_what_the_grammar_allows(vocabulary: Vocabulary) -> None:
    seven, eight, semicolon = (tokens_of(vocabulary, text)[0] for text in "78;")
    grammar = vocabulary.compiled(regex("[78]+7;")).begin()
    assert grammar.drafted([seven, eight, semicolon], 9) == [seven, eight]
    assert grammar.drafted([seven, eight, seven], 1) == [seven]
    assert grammar.drafted([semicolon], 9) == []
    forced = vocabulary.compiled(regex("import os 7")).begin()
    assert vocabulary.tokens.decode_str(forced.drafted([semicolon], 99)) == "import os 7"


def test_drafts_stop_where_a_grammar_begins_or_a_sequence_becomes_free(
    vocabulary: Vocabulary,
) -> None:
    opening, seven, end, other = (tokens_of(vocabulary, text)[0] for text in "(7;x")
    grammar = vocabulary.compiled(regex("7;")).begin(after="(", repeats=True)
    assert grammar.allowed([other, other, opening, seven]) == 2
    follow(grammar, [other, opening])
    assert grammar.allowed([seven, end, other]) == 1
    follow(grammar, [seven, end])
    assert not grammar.is_masking
    assert grammar.allowed([seven, other]) == 2


def test_a_sequence_does_not_end_before_its_grammar_begins(vocabulary: Vocabulary) -> None:
    other, seven, trigger, end = [*(tokens_of(vocabulary, text)[0] for text in "x7("), 0]
    grammar = vocabulary.compiled(regex("77")).begin(after="(", is_required=True)
    processor = GrammarProcessor(grammar)
    thinking = mx.array([1, other])
    for count in (1, 2):
        allowed = _finite(processor(thinking[:count], mx.zeros((1, 4096))))
        assert end not in allowed
        assert len(allowed) == 4095
    assert grammar.drafted([other, end, other], 9) == [other]
    masked = within_grammars(mx.zeros((1, 2, 4096)), {0: grammar}, [[other, other]])
    assert [len(_finite(masked[:, at])) for at in range(2)] == [4095, 4095]
    assert grammar.drafted([other, trigger, seven], 9) == [other]
    assert grammar.drafted([end], 9) == [], "nothing is forced before the grammar begins"
    follow(grammar, [trigger])
    assert vocabulary.tokens.decode_str(grammar.drafted([other], 9)) == "77"


def test_a_token_is_taken_once(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compiled(regex("777")).begin()
    (digit,) = tokens_of(vocabulary, "7")
    for at in (0, 0, 1, 1, 0):
        grammar.take(digit, at)
    assert grammar.error is None
    assert grammar.allowed([digit, digit]) == 1


def test_logits_behind_the_vocabulary_are_masked(vocabulary: Vocabulary) -> None:
    """Models have more logits than tokens, to make their number round."""
    processor = GrammarProcessor(vocabulary.compiled(regex("7")).begin())
    allowed = _finite(processor(mx.array([1]), mx.zeros((1, 4200))))
    assert allowed == tokens_of(vocabulary, "7")


@pytest.mark.parametrize("grammar", [regex("(a"), lark("nothing"), json_schema({"not": {}})])
def test_wrong_grammars_raise(grammar: Any, vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError):
        vocabulary.compiled(grammar)
