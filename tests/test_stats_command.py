"""`paged-kv stats`: what it prints adds up, and bad arguments are refused with an example."""

import argparse
import json
from typing import Any

import pytest

from paged_kv.replay import ReplayResult, Workload, replay
from paged_kv.sizes import format_size, parse_size
from paged_kv.stats_command import add_stats_parser

TOKEN_BYTES = 1000


def stats(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_stats_parser(parser.add_subparsers())
    parsed = parser.parse_args(["stats", *arguments])
    status: int = parsed.run(parsed)
    return status


def assert_adds_up(result: ReplayResult) -> None:
    ended_or_live = result.sequences_live + result.sequences_ended
    assert result.sequences_started == ended_or_live + result.allocation_failures
    assert result.allocated_bytes <= result.active_bytes <= result.mapped_bytes
    assert result.mapped_bytes <= result.peak_mapped_bytes <= result.budget_bytes
    wasted = (1 - result.internal_waste) * (1 - result.external_fragmentation)
    assert result.utilisation == pytest.approx(wasted)
    waste_bytes = result.active_bytes - result.allocated_bytes
    assert result.mean_waste_tokens * result.sequences_live * TOKEN_BYTES == waste_bytes


@pytest.mark.parametrize("churn", [0, 0.5, 1])
def test_bytes_add_up_when_everything_fits(churn: float) -> None:
    result = replay(Workload(64, 100, 2000, churn), TOKEN_BYTES, 10**9)
    assert_adds_up(result)
    assert result.sequences_live == 64
    assert result.sequences_ended == 64 * churn
    assert result.allocation_failures == 0
    assert 64 * 100 <= result.allocated_tokens <= 64 * 2000


def test_bytes_add_up_when_sequences_do_not_fit() -> None:
    # Room for 58 pages of 256 tokens, where 64 sequences of 4 pages each are asked for.
    result = replay(Workload(64, 1024, 1024), TOKEN_BYTES, 15_000_000)
    assert_adds_up(result)
    assert result.sequences_live == 14
    assert result.allocation_failures > 0


def test_a_budget_below_one_block_maps_nothing() -> None:
    result = replay(Workload(3, 1, 1, churn=0), TOKEN_BYTES, 1000)
    assert_adds_up(result)
    assert (result.allocation_failures, result.mapped_bytes, result.utilisation) == (3, 0, 1.0)


def test_one_sequence_by_hand() -> None:
    # 1,025 tokens take 5 pages: the first slab holds 4 pages and the second 8.
    result = replay(Workload(1, 1025, 1025, churn=0), TOKEN_BYTES, 10**9)
    assert (result.slabs, result.active_tokens) == (2, 5 * 256)
    assert result.mapped_bytes == 12 * 256 * TOKEN_BYTES
    assert result.mean_waste_tokens == 255
    assert result.internal_waste == pytest.approx(255 / 1280)
    assert result.external_fragmentation == pytest.approx(7 / 12)


def test_whole_pages_waste_nothing() -> None:
    assert replay(Workload(8, 512, 512), TOKEN_BYTES, 10**9).mean_waste_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_mean_waste_is_half_a_page(seed: int) -> None:
    # 1,000 sequences: the mean of uniform 0 to 255 has a standard deviation of 2.3.
    result = replay(Workload(1000, 1, 2560, seed=seed), TOKEN_BYTES, 10**10)
    assert result.mean_waste_tokens == pytest.approx(127.5, abs=10)


def test_a_seed_always_gives_the_same() -> None:
    runs = [replay(Workload(50, 1, 3000, seed=s), TOKEN_BYTES, 10**9) for s in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_json_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert stats("--json", "--sequences", "4", "--lengths", "300", "--layers", "2") == 0
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    # 2 layers, keys and values, 8 heads of 128 numbers of 2 bytes
    assert output["allocated_bytes"] == 4 * 300 * 2 * 2 * 8 * 128 * 2
    assert output["active_tokens"] == 4 * 512
    assert output["budget_bytes"] == 16_000_000_000
    assert output["internal_waste"] == pytest.approx(1 - 300 / 512)
    assert output["mean_waste_tokens"] == 212


def test_table_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert stats("--max-bytes", "1GB") == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        "sequences",
        "allocated",
        "active",
        "mapped",
        "utilisation",
        "internal waste",
        "external fragmentation",
        "allocation failures",
    ]


@pytest.mark.parametrize(
    ("flag", "value", "example"),
    [
        ("--max-bytes", "10GBB", "'10GBB' is not a size; write one like 512MB, 4GB or 1.5GiB"),
        ("--max-bytes", "0", "like 512MB"),
        ("--sequences", "0", "such as 8"),
        ("--layers", "-1", "such as 8"),
        ("--lengths", "2000,100", "such as 100,2000"),
        ("--lengths", "0", "such as 100,2000"),
        ("--lengths", "1,2,3", "like 100,2000"),
        ("--lengths", "many", "like 100,2000"),
        ("--churn", "1.5", "such as 0.5"),
        ("--churn", "nan", "such as 0.5"),
    ],
)
def test_bad_arguments_exit_with_2_and_an_example(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, example: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        stats(f"{flag}={value}")
    assert exit_info.value.code == 2
    assert example in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512MB", 512_000_000),
        ("4GB", 4_000_000_000),
        ("4g", 4_000_000_000),
        ("2 TB", 2_000_000_000_000),
        ("1.5GiB", 1_610_612_736),
        ("0.1GB", 100_000_000),
        ("1KiB", 1024),
        ("12b", 12),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "10GBB", "-1GB", "1e9", "1.GB", "4iB", "0.5", "٤GB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="like 512MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (8_590_000_000, "8.59 GB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
