"""Chats: the roles that templates take, and tokens of parts that are those of whole texts."""

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, processors
from tokenizers.normalizers import NFKC, BertNormalizer, Strip
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, Metaspace, Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_kv.server.engine.chat_templates import (
    KeptTokens,
    TemplateRoles,
    kept_tokens_of,
    roles_of,
)
from tests.support.examples import examples

SHOWN = "{{ '<' + m.role + '>' + m.content }}"
TEMPLATES = {
    "any": SHOWN,
    "developer": "{% if m.role == 'developer' %}{% endif %}" + SHOWN,
    "first": "{% if m.role == 'system' and not loop.first %}{{ no() }}{% endif %}" + SHOWN,
    "drops": "{% if loop.first or m.role != 'system' %}" + SHOWN + "{% endif %}",
    "none": "{% if m.role == 'system' %}{{ no() }}{% endif %}" + SHOWN,
    "other": "{{ no() }}",
}
CHAT = [("system", "a"), ("developer", "b"), ("user", "c"), ("system", "d"), ("user", "e")]
CHAT += [("assistant", "f"), ("developer", "g")]
PLAIN = "<system>a<system>b<user>c<system>d<user>e<assistant>f<system>g"
MARKED = "c\n\n<system>\nd\n</system>\n\ne<assistant>f<user><system>\ng\n</system>"


class Templated(PreTrainedTokenizerBase):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.chat_template = TEMPLATES[name]

    def rendered(self, messages: Any, **_: Any) -> str:
        template = "{% for m in messages %}" + str(self.chat_template) + "{% endfor %}"
        return jinja2.Environment().from_string(template).render(messages=messages)


def roles(name: str) -> tuple[TemplateRoles, Templated]:
    inner = Templated(name)
    tokenizer = SimpleNamespace(
        _tokenizer=inner,
        _chat_template=None,
        has_chat_template=True,
        apply_chat_template=inner.rendered,
    )
    return roles_of(tokenizer, {}), inner


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("any", PLAIN),
        ("developer", PLAIN.replace("system>b", "developer>b").replace("system>g", "developer>g")),
        ("first", f"<system>a\n\nb<user>{MARKED}"),
        ("drops", f"<system>a\n\nb<user>{MARKED}"),
        (
            "none",
            "<user><system>\na\n</system>\n\n<system>\nb\n</system>\n\n" + MARKED,
        ),
    ],
)
def test_instructions_stay_in_their_places_in_a_form_that_the_template_shows(
    name: str, expected: str
) -> None:
    known, inner = roles(name)
    messages = [{"role": role, "content": text} for role, text in CHAT]
    assert inner.rendered(known.fitted(messages, {})) == expected
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    for each in (fitted := known.fitted(parts, {})):
        each["content"] = "".join(part["text"] for part in each["content"])
    assert inner.rendered(fitted) == expected
    for end in range(1, len(CHAT) - 1):
        assert expected.startswith(inner.rendered(known.fitted(messages[:end], {})))


def test_a_template_that_shows_nothing_gets_what_there_is() -> None:
    messages = [{"role": role, "content": text} for role, text in CHAT]
    known, _ = roles("other")
    assert [each["content"] for each in known.fitted(messages, {})] == [text for _, text in CHAT]
    assert known.fitted(messages, {"developer": "DEVELOPER: "}) == messages


START, END = "<|im|>", "<|end|>"
LETTERS = sorted("abcdims ▁<>|.1\n界é\u0338Ġ")
PAIRS = ("ab", "▁a", "im", "<|", "|>", "▁▁")
VOCABULARY = {text: number for number, text in enumerate(["<unk>", *LETTERS, *PAIRS])}


def pairs() -> Any:
    merges = [(pair[0], pair[1]) for pair in PAIRS]
    return models.BPE(VOCABULARY, merges, unk_token="<unk>", fuse_unk=True)


def unigrams() -> Any:
    return models.Unigram([(each, -number % 7 - 7.0) for each, number in VOCABULARY.items()], 0)


def words() -> Any:
    inside = {f"##{each}": 100 + number for number, each in enumerate(LETTERS)}
    return models.WordPiece(VOCABULARY | inside, unk_token="<unk>")


PREFIXED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
NORMALIZERS = [None, PREFIXED, NFKC(), Strip(), BertNormalizer()]
PREFIXES = [Metaspace(prepend_scheme=scheme) for scheme in ("first", "always")]
WORDS = Split(Regex(" "), "merged_with_previous")
SPLITS = [None, ByteLevel(add_prefix_space=True), *PREFIXES, WORDS, BertPreTokenizer()]
KINDS = list(product([pairs, unigrams, words], NORMALIZERS, SPLITS))
# Beside the template's own tokens; some look at their neighbours, or hide a border.
OTHERS = [
    ("ab", {}),
    ("ab", {"lstrip": True, "rstrip": True}),
    ("im", {"single_word": True}),
    ("\n", {"rstrip": True}),
    ("é", {"normalized": True}),
    ("<|", {}),
    ("a<", {}),
    (START + "a", {}),
    (f"b{START}.", {"normalized": True}),
]


def tokenizer(kind: Any = KINDS[0], *others: Any, **start: Any) -> SimpleNamespace:
    """A tokenizer as mlx-lm holds it. `others` are further added tokens, and `start` says what is
    special about the first of the template's."""
    model, normalizer, split = kind
    made: Any = Tokenizer(model())
    made.normalizer, made.pre_tokenizer = normalizer, split
    made.add_special_tokens([AddedToken(START, **{"normalized": False} | start), END])
    made.add_tokens([AddedToken(text, **{"normalized": False} | how) for text, how in others])
    ends = [(each, made.token_to_id(each)) for each in (START, END)]
    made.post_processor = processors.TemplateProcessing(f"{START} $A {END}", special_tokens=ends)
    made.enable_truncation(3)
    return held(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"))


def held(inner: Any) -> SimpleNamespace:
    inner.chat_template = f"{START}{END}\n ab "
    return SimpleNamespace(_tokenizer=inner, _chat_template=None)


def whole(made: SimpleNamespace, text: str) -> list[int]:
    tokens: list[int] = made._tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def in_parts(kept: KeptTokens, made: SimpleNamespace, text: str, least: int) -> list[int]:
    parts = [
        kept.tokens(part, None, lambda part: whole(made, part)) for part in kept.parts(text, least)
    ]
    return [token for part in parts for token in part]


PIECES = st.sampled_from([*LETTERS, START, START, END, "<|im", "|>", "ab", "  "])
TEXTS = st.lists(st.lists(PIECES, max_size=40).map("".join), min_size=4, max_size=4)


@given(st.sampled_from(KINDS), st.sampled_from(OTHERS), TEXTS, st.sampled_from([1, 9]))
@examples(60)
def test_parts_have_the_tokens_of_the_whole(
    kind: Any, other: Any, texts: list[str], least: int
) -> None:
    made = tokenizer(kind, other)
    kept = kept_tokens_of(made)
    for text in texts:
        assert kept is None or in_parts(kept, made, text, least) == whole(made, text)


@pytest.mark.parametrize(
    ("start", "other", "text"),
    [
        ({"lstrip": True}, "c", f"a {START}"),
        ({"single_word": True}, "c", f"a{START}"),
        ({"normalized": True}, "c", f"a{START}"),
        ({}, "b<", f"b{START}"),
        ({}, f"b{START}.", f"b{START}."),
        ({"lstrip": True}, "<|", f"a {START}"),
        ({}, "ab", "imab"),
        ({}, "\n", "a \n"),
    ],
)
def test_texts_are_not_cut_where_a_neighbour_may_matter(
    start: dict[str, bool], other: str, text: str
) -> None:
    kept = kept_tokens_of(tokenizer(KINDS[0], (other, {}), **start))
    assert kept is None or [*kept.parts(text, 1)] == [text]


class Spaced(PreTrainedTokenizerFast):  # type: ignore[misc]
    def encode(self, text: str, **named: Any) -> Any:
        return super().encode(f" {text}", **named)


class OfItsOwn(PreTrainedTokenizerFast):  # type: ignore[misc]
    def apply_chat_template(self, *given: Any, **named: Any) -> Any:
        return super().apply_chat_template(*given, **named)


UNSPLIT = partial(PreTrainedTokenizerFast, split_special_tokens=True)


@pytest.mark.parametrize("other", [Spaced, OfItsOwn, UNSPLIT, SimpleNamespace])
def test_other_tokenizers_are_never_cut(other: Any) -> None:
    made = tokenizer()._tokenizer.backend_tokenizer
    assert kept_tokens_of(held(other(tokenizer_object=made, unk_token="<unk>"))) is None


def test_tokens_are_made_once_for_a_salt_and_forgotten_beyond_the_limit() -> None:
    pattern: Any = kept_tokens_of(tokenizer())
    made: list[str] = []

    def encode(part: str) -> list[int]:
        made.append(part)
        return [1]

    kept = KeptTokens(pattern._borders, most_bytes=1000)
    for part, salt in [("a", 1), ("a", 1), ("a", 2), ("b", 2), ("b", 2), ("a", 1)]:
        assert [*kept.tokens(part, salt, encode)] == [1]
    assert made == ["a", "a", "b", "a"]
