"""One model on several processes of this machine: tokens, budgets and caches are those of one."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support import rank_cases
from tests.support.launched_ranks import launched, output_of, told


def alone(case: str, *arguments: str) -> Any:
    """What a case returns in this process, in the form in which ranks tell it."""
    return json.loads(json.dumps(getattr(rank_cases, case)(mx.distributed.init(), *arguments)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "case", "names"),
    [
        (2, "stories", ("llama", "qwen3", "gpt_oss")),
        (2, "stories", ("gemma3_text", "qwen3_5", "qwen2")),
        (3, "three", ("llama",)),
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


@pytest.mark.slow
def test_drafts_of_ranks_change_no_token(tmp_path: Path) -> None:
    names = ("llama", "qwen3_5")
    expected, found = alone("drafts", *names), told(tmp_path, 2, "drafts", *names)
    for ranks in (found[0], found[1], expected):
        for name in names:
            plain, of_head, drafted, of_look_up, looked_up = ranks[name]
            assert plain == of_head == of_look_up == expected[name][0]
            assert drafted > 50
            assert looked_up > 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_ranks_of_heads_append_all_rows(tmp_path: Path) -> None:
    found = told(tmp_path, 2, "rows", "deepseek_v41")
    assert found[0] == found[1]
    for stock, paged, again, cached in found[0]:
        assert stock == paged == again
        assert cached > 0


@pytest.mark.slow
def test_ranks_give_the_same_tokens_by_compiled_steps(tmp_path: Path) -> None:
    names = ("llama", "qwen3_5")
    expected = alone("stories", *names)
    compiled = {"PAGED_KV_BACKEND": "plain", "PAGED_KV_COMPILE": "1"}
    found = told(tmp_path, 2, "stories", *names, **compiled)
    for name in names:
        assert [each[name] for each in found] == [expected[name]] * 2
        repeated, other = [each[f"of {name}"]["repeated"] for each in found]
        assert repeated == other > 20


@pytest.mark.slow
def test_a_step_that_was_interrupted_on_all_ranks_can_be_repeated(tmp_path: Path) -> None:
    names = ("qwen3", "qwen3_5", "deepseek_v41")
    expected = alone("interrupted", *names)
    assert told(tmp_path, 2, "interrupted", *names) == [expected] * 2
    for interrupted, undisturbed in expected.values():
        assert interrupted == undisturbed


@pytest.mark.slow
def test_a_pool_that_is_full_on_one_rank_is_full_on_all(tmp_path: Path) -> None:
    found = told(tmp_path, 2, "full")
    assert found[0] == found[1]
    assert found[0]["batched"] == alone("full")["batched"]
    assert found[0]["preemptions"] > 0
    assert "within a budget of 1,200,000 bytes" in found[0]["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_random_histories_keep_ranks_alike(tmp_path: Path, seed: str) -> None:
    found = told(tmp_path, 2, "history", seed)
    assert found[0] == found[1]
    *requests, evicted = found[0]
    assert len({digest for _, digest in requests}) > 5
    assert evicted > 0


@pytest.mark.slow
def test_stores_restore_what_every_rank_has_after_a_restart(tmp_path: Path) -> None:
    found = told(tmp_path, 2, "restart", str(tmp_path / "store"))
    assert found[0] == found[1]
    assert [each["cached"] for each in found[0]] == [0, 699, 256]
    first, *others = [each["tokens"] for each in found[0]]
    assert others == [first, first]


@pytest.mark.slow
def test_generate_prints_the_text_of_one_process_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paged_kv.command_line import main

    options = ["--prompt", "def read_file(path):", "--max-tokens", "8"]
    with launched(tmp_path, 2, "-m", "paged_kv", "generate", *options) as processes:
        assert [process.wait(85) for process in processes] == [0, 0], output_of(tmp_path, 0)
    assert main(["generate", *options]) == 0
    text = capsys.readouterr().out
    assert text.strip()
    assert text in output_of(tmp_path, 0)
    assert text.strip() not in output_of(tmp_path, 1)
    assert "rank        1 of 2" in output_of(tmp_path, 1)
    assert not any("[ring]" in output_of(tmp_path, rank) for rank in range(2))
