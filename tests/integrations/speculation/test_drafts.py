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
from tests.support.zoo import small_model

ONCE = [1, 2, 3, 4, 5, 6, 7, 8]


def proposed(draft: NGramDraft, state: Any, tokens: list[int], most: int = 3) -> list[int]:
    (found,) = draft.propose([DraftRow(state, tokens[:-1], tokens[-1], most)])
    return found


def test_rows_learn_from_other_rows_of_their_salt_only_if_allowed() -> None:
    alone, shared = NGramDraft(2), NGramDraft(2, shared_tokens=100)
    for draft in (alone, shared):
        proposed(draft, draft.begin("a"), ONCE)
    assert proposed(alone, alone.begin("a"), [2, 3]) == []
    assert proposed(shared, shared.begin("b"), [2, 3]) == []
    assert proposed(shared, shared.begin("a"), [2, 3]) == [4, 5, 6]


@pytest.fixture(scope="module")
def small() -> Any:
    return small_model("llama")


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
