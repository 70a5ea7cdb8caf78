"""What drafts propose: prompt look-up, and a smaller model for all rows at once."""

from typing import Any

import pytest
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import make_prompt_cache

from paged_kv import (
    ModelDraft,
    NGramDraft,
    PagedCacheFactory,
    PoolExhausted,
    speculative_batch_generate,
)
from paged_kv.integrations.speculation.draft_lengths import FixedLengths
from paged_kv.integrations.speculation.drafts import DraftRow
from tests.support.generation import assert_nothing_is_used, greedy
from tests.support.zoo import small_model

ONCE = [1, 2, 3, 4, 5, 6, 7, 8]


def proposed(draft: NGramDraft, state: Any, tokens: list[int], most: int = 3) -> list[int]:
    (found,) = draft.propose([DraftRow(state, tokens[:-1], tokens[-1], most)])
    return found


def test_look_up_proposes_what_followed_the_latest_same_tokens() -> None:
    draft = NGramDraft(2)
    state = draft.begin(None)
    assert not draft.may_follow(state, ONCE)
    assert proposed(draft, state, ONCE) == []
    text = [*ONCE, 9, 1, 2]
    assert draft.may_follow(state, text)
    assert proposed(draft, state, text) == [3, 4, 5]
    text += [30, 40, 50, 1, 2]
    assert proposed(draft, state, text, 2) == [30, 40]


def test_look_up_goes_on_with_a_period_that_is_shorter_than_the_draft() -> None:
    draft = NGramDraft(3)
    assert proposed(draft, draft.begin(None), [7, 8] * 3, 5) == [7, 8, 7, 8, 7]


def test_tokens_that_come_one_by_one_are_learned_as_all_at_once() -> None:
    text = [(i * i) % 11 for i in range(40)]
    draft = NGramDraft(2)
    state = draft.begin(None)
    for end in range(1, len(text)):
        whole = draft.begin(None)
        assert proposed(draft, state, text[:end]) == proposed(draft, whole, text[:end])


def test_rows_learn_from_other_rows_of_their_salt_only_if_allowed() -> None:
    alone, shared = NGramDraft(2), NGramDraft(2, shared_tokens=100)
    for draft in (alone, shared):
        proposed(draft, draft.begin("a"), ONCE)
    assert proposed(alone, alone.begin("a"), [2, 3]) == []
    assert proposed(shared, shared.begin("b"), [2, 3]) == []
    assert proposed(shared, shared.begin("a"), [2, 3]) == [4, 5, 6]


def test_shared_tokens_are_bounded_and_the_oldest_go_first() -> None:
    draft = NGramDraft(2, shared_tokens=4)
    proposed(draft, draft.begin(None), ONCE)  # its n-grams end at 2, 3, .. 7
    assert proposed(draft, draft.begin(None), [2, 3]) == []
    assert proposed(draft, draft.begin(None), [5, 6], 2) == [7, 8]


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="n must be"):
        NGramDraft(0)
    with pytest.raises(ValueError, match="shared_tokens must be"):
        NGramDraft(shared_tokens=-1)


@pytest.fixture(scope="module")
def small() -> Any:
    return small_model("llama")


def test_a_model_drafts_its_greedy_tokens_for_all_rows(small: Any) -> None:
    """Also after some of its drafts were rejected, and for a row that fell behind."""
    factory = PagedCacheFactory(small, max_bytes=64 << 20)
    draft = ModelDraft(small, factory)
    states = [draft.begin(None) for _ in range(3)]
    texts = [[(5 * i * i + k) % 97 for i in range(n)] for k, n in enumerate((1, 300, 40))]
    for asked, extra in (((0, 1, 2), 1), ((0, 1), 2), ((0, 1, 2), 5), ((1, 2), 3)):
        rows = [DraftRow(states[at], texts[at][:-1], texts[at][-1], 2 + at) for at in asked]
        draft.prepare(rows)
        for at, found in zip(asked, draft.propose(rows), strict=True):
            expected = greedy(small, texts[at], make_prompt_cache(small), 2 + at).tokens
            assert found == expected
            # Accept some of the drafts, and then another token.
            texts[at] = [*texts[at], *found[: extra - 1], 11]
    del states, rows
    factory.clear()
    assert_nothing_is_used(factory)


def test_a_prompt_that_the_draft_model_has_read_is_not_read_again(small: Any) -> None:
    factory = PagedCacheFactory(small, max_bytes=64 << 20)
    draft = ModelDraft(small, factory)
    text = [(5 * i * i) % 97 for i in range(400)]

    def drafts(salt: str) -> list[list[int]]:
        rows = [DraftRow(draft.begin(salt), text[:-1], text[-1], 3)]
        draft.prepare(rows)
        return draft.propose(rows)

    first = drafts("a")
    before = factory.stats().prefix_hits
    assert drafts("b") == first
    assert factory.stats().prefix_hits == before
    assert drafts("a") == first
    assert factory.stats().prefix_hits > before + 300


def test_a_draft_model_without_memory_drafts_nothing_and_holds_none(small: Any) -> None:
    factory = PagedCacheFactory(small, max_bytes=1 << 20)
    draft = ModelDraft(small, factory)
    text = [(5 * i * i) % 97 for i in range(5000)]
    rows = [
        DraftRow(draft.begin(None), text, 1, 3),
        DraftRow(draft.begin(None), [], 1, 3),
    ]
    draft.prepare(rows)
    assert draft.propose(rows) == [[], []]
    factory.clear()
    assert_nothing_is_used(factory)


def test_a_draft_model_with_recurrent_layers_is_refused() -> None:
    hybrid = small_model("qwen3_next")
    with pytest.raises(ValueError, match="a draft model must keep pages in every layer"):
        ModelDraft(hybrid, PagedCacheFactory(hybrid))


@pytest.mark.parametrize("kind", ["model", pytest.param("look-up", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_speculative_batch_generate_returns_what_batch_generate_returns(
    kind: str, trained: Any, prompts: list[list[int]]
) -> None:
    model, tokenizer = trained("stdlib-llama")
    draft = NGramDraft(2) if kind == "look-up" else model
    stock = batch_generate(model, tokenizer, prompts, max_tokens=[30, 20, 25])
    ours = speculative_batch_generate(
        model,
        draft,
        tokenizer,
        prompts,
        lengths=FixedLengths(),
        max_tokens=[30, 20, 25],
        max_bytes="64MB",
    )
    assert ours.texts == stock.texts
    assert ours.stats.generation_tokens == 75
    assert ours.counts.accepted_tokens == sum(row.accepted_tokens for row in ours.row_counts)
    assert ours.counts.accepted_tokens > (50 if kind == "model" else 5)
    assert ours.stats.generation_steps < (15 if kind == "model" else 30)


def test_wrong_arguments_are_refused(trained: Any) -> None:
    model, tokenizer = trained("stdlib-llama")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"prompts": [[1], []]}, ValueError, "prompts"),
        ({"prompts": ["a", [1.5]]}, TypeError, "prompts"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"max_tokens": [1, 2]}, ValueError, "one for each prompt"),
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens"),
        ({"draft": "small"}, TypeError, "draft"),
        ({"max_bytes": "many"}, ValueError, "max_bytes"),
        ({"max_bytes": 100}, PoolExhausted, "blocks"),
    ]
    for options, error, message in cases:
        given = {"draft": NGramDraft(), "prompts": [[1, 2, 3]], **options}
        with pytest.raises(error, match=message):
            speculative_batch_generate(model, tokenizer=tokenizer, **given)
        # Nothing stays installed.
        assert type(make_prompt_cache(model)[0]).__name__ == "KVCache"
