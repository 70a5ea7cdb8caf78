"""Schemas in other keywords, for llguidance: what fits them fits the schemas as they were given."""

import json
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benches.generated_schemas import generated_schema
from paged_kv.integrations.grammar.grammars import GrammarError, json_schema, require_valid
from paged_kv.integrations.grammar.schemas import equivalent_schema
from paged_kv.integrations.grammar.vocabulary import Vocabulary
from tests.support.grammar_walks import walked_text

BASE = {"$defs": {"base": {"properties": {"id": {"type": "integer"}}}}}
NEEDS = {"properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"const": 1}}}
CLOSED = {"unevaluatedProperties": False}
NO_MORE = {"additionalProperties": False}
TEXT: dict[str, Any] = {"properties": {"t": {"type": "string"}}}
# A schema, and texts that fit and do not, of which the new schema takes and refuses the same.
TAKEN: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"maxItems": 2.0, "type": "array"}, ["[1,2]"], ["[1,2,3]"]),
    ({"type": "integer", "format": "int32"}, ["7"], ['"7"']),
    ({"type": "string", "format": "regex"}, ['"("'], ["1"]),
    ({"type": "boolean", "if": {"const": 0}}, ["true"], ["0"]),
    ({"type": "boolean", "then": {"const": 0}, "else": {}}, ["true"], ["0"]),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, ["[null,null]"], ["[1]"]),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, ["[1]"], ["[1,1]"]),
    ({"type": "array", "contains": {"const": 1}, "minContains": 0}, ["[2]"], ["{}"]),
    (
        {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False},
        ["[1]"],
        ["[1,1]"],
    ),
    ({"type": "object", **TEXT, **CLOSED}, ['{"t":"a"}'], ['{"u":1}']),
    (
        {"type": "object", **BASE, "$ref": "#/$defs/base", **TEXT, **CLOSED},
        ['{"id":1,"t":"a"}', "{}"],
        ['{"u":1}', '{"id":"a"}'],
    ),
    (
        {"type": "object", "allOf": [{"properties": {"b": True, "a": True}}], **CLOSED},
        ['{"b":1,"a":2}'],
        ['{"b":1,"a":2,"c":3}'],
    ),
    (
        {"type": "object", "anyOf": [TEXT, BASE["$defs"]["base"]], **CLOSED},
        ['{"t":"a"}', '{"id":1}'],
        ['{"u":1}'],
    ),
    (
        {"type": "object", **NEEDS, "dependentRequired": {"a": ["c"]}, **NO_MORE},
        ['{"a":null,"c":1}', '{"b":true}'],
        ['{"a":null}'],
    ),
    (
        {"type": "object", **NEEDS, "dependentSchemas": {"a": {"required": ["b"]}}, **NO_MORE},
        ['{"a":null,"b":true}', "{}"],
        ['{"a":null}'],
    ),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    from tests.integrations.grammar.test_call_forms import of_form

    return Vocabulary(of_form("minicpm5", with_tokens=False))


@pytest.mark.parametrize(("schema", "fitting", "others"), TAKEN)
@pytest.mark.slow
def test_new_keywords_say_the_same(
    schema: dict[str, Any], fitting: list[str], others: list[str], vocabulary: Vocabulary
) -> None:
    before = json.dumps(schema)
    compiled = vocabulary.compiled(json_schema(schema))
    assert json.dumps(schema) == before, "it was changed"
    for text in (*fitting, *others):
        matcher = compiled.begin().matcher
        tokens = vocabulary.tokens.tokenize_str(text)
        does_fit = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert does_fit == (text in fitting), text
        assert Draft202012Validator(schema).is_valid(json.loads(text)) == (text in fitting)
    random = Random(1)
    for _ in range(8):
        written = walked_text(compiled, random, ["{", "}", '"a":', '"t"', "1", "null", "]", ","])
        if written is not None:
            assert Draft202012Validator(schema).is_valid(json.loads(written)), written


@pytest.mark.parametrize(
    "schema",
    [
        {"dependentRequired": 5},
        {"dependentRequired": {"a": 5}},
        {"properties": 5, "unevaluatedProperties": False},
        {"allOf": 5, "unevaluatedProperties": False},
        {"allOf": [{"$ref": 7}], "unevaluatedProperties": False},
        {"format": []},
        {"oneOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"$ref": "https://example.com/schema"},
    ],
)
def test_what_cannot_be_said_otherwise_is_refused_as_before(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        require_valid(json_schema(schema))


def test_references_to_many_references_take_no_time() -> None:
    """Each part refers ten times to the next."""
    parts = {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 10} for at in range(40)}
    schema = {"$defs": {**parts, "40": {}}, "$ref": "#/$defs/0", "unevaluatedProperties": False}
    assert "unevaluatedProperties" not in equivalent_schema(schema)


@pytest.mark.slow
def test_texts_of_generated_schemas_are_valid(vocabulary: Vocabulary) -> None:
    """Every text that ends by itself, written by chance. The bench tries 2,000 schemas."""
    random, ended, taken = Random(7), 0, 0
    while taken < 24:
        schema = generated_schema(random)
        with suppress(GrammarError):
            compiled = vocabulary.compiled(json_schema(schema))
            taken += 1
            text = walked_text(compiled, random, ["{", "}", '"', "1", "null", "]", ",", "-1.5e3"])
            if text is not None:
                ended += 1
                assert Draft202012Validator(schema).is_valid(json.loads(text)), (schema, text)
    assert ended > taken / 2
