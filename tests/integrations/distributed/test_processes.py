"""One model on several processes of this machine: tokens, budgets and caches are those of one."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support import rank_cases
from tests.support.launched_ranks import told


def alone(case: str, *arguments: str) -> Any:
    """What a case returns in this process, in the form in which ranks tell it."""
    return json.loads(json.dumps(getattr(rank_cases, case)(mx.distributed.init(), *arguments)))


@pytest.mark.parametrize(
    ("size", "case", "names"),
    [
        pytest.param(2, "stories", ("qwen3_5",), marks=pytest.mark.slow),
        pytest.param(2, "stories", ("gemma3_text", "gpt_oss", "qwen2"), marks=pytest.mark.soak),
        pytest.param(3, "three", ("llama",), marks=pytest.mark.soak),
    ],
)
def test_ranks_give_the_tokens_of_one_process(
    tmp_path: Path, size: int, case: str, names: tuple[str, ...]
) -> None:
    expected = alone(case, *names)
    found = told(tmp_path, size, case, *names)
    for name in names:
        assert expected[name]["cached"][1] == 0 < expected[name]["cached"][0]
        assert [each[name] for each in found] == [expected[name]] * size
        ranks, one = [each[f"of {name}"] for each in found], expected[f"of {name}"]
        assert ranks == [ranks[0]] * size
        assert ranks[0]["budget"] == rank_cases.SMALL
        assert [size * each for each in ranks[0]["block_bytes"]] == one["block_bytes"]


@pytest.mark.soak
def test_drafts_of_ranks_change_no_token(tmp_path: Path) -> None:
    names = ("llama", "qwen3_5")
    expected, found = alone("drafts", *names), told(tmp_path, 2, "drafts", *names)
    for ranks in (found[0], found[1], expected):
        for name in names:
            plain, of_head, drafted, of_look_up, looked_up = ranks[name]
            assert plain == of_head == of_look_up == expected[name][0]
            assert drafted > 50
            assert looked_up > 0


@pytest.mark.soak
@pytest.mark.parametrize("case", ["stories", "rows"])
def test_ranks_of_layers_append_the_rows_that_one_process_appends(
    tmp_path: Path, case: str
) -> None:
    """A rank gets rows of the ranks before it; in batches too, which mlx-lm cannot compute."""
    name = "deepseek_v41 by layers"
    expected, found = alone(case, name), told(tmp_path, 2, case, name)
    if case == "stories":
        expected, found = expected[name], [each[name] for each in found]
        assert expected["cached"] == [308, 0]
    assert found == [expected, expected]


@pytest.mark.soak
@pytest.mark.parametrize("seed", ["1", "2"])
def test_random_histories_keep_ranks_alike(tmp_path: Path, seed: str) -> None:
    found = told(tmp_path, 2, "history", seed)
    assert found[0] == found[1]
    *requests, evicted = found[0]
    assert len({digest for _, digest in requests}) > 5
    assert evicted > 0


@pytest.mark.soak
def test_stores_restore_what_every_rank_has_after_a_restart(tmp_path: Path) -> None:
    found = told(tmp_path, 2, "restart", str(tmp_path / "store"))
    assert found[0] == found[1]
    assert [each["cached"] for each in found[0]] == [0, 512, 256]
    first, *others = [each["tokens"] for each in found[0]]
    assert others == [first, first]
