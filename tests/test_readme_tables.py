"""The tables of the README: made from results files, and up to date."""

import json
from pathlib import Path
from typing import Any

import pytest

from benches.readme_tables import TABLES, main, measured_on, newest, rewritten, section

MACHINE = {
    "chip": "Chip",
    "cores": "2 cores",
    "memory_bytes": 24 * 2**30,
    "system": "Linux x86_64",
}
VERSIONS = {"python": "3.11.7", "mlx": "0.32.4", "mlx-lm": "0.32.2", "numpy": "2.4.6"}
PHASE = {"seconds": 0.002, "new_bytes": 2**20, "blocks_used": 128, "blocks_copied_change": 8}
GROWN = {
    "held_bytes": 512 * 2**20,
    "peak_above_held_bytes": 2**20,
    "copied_for_growth_bytes": 3 * 2**30,
    "median_step_seconds": 0.00064,
    "max_step_seconds": 0.98,
}
RUN = {
    "wall_seconds": 90.25,
    "prompt_tokens_per_second": 1234.5,
    "generation_tokens_per_second": 99.6,
    "all_tokens_per_second": 400.0,
    "peak_memory_bytes": 2**30,
    "peak_tokens_held": 1024,
}
LOST = {
    "perplexity": 12.5,
    "loss_percent": 0.654,
    "standard_error_percent": 0.081,
    "kl_nats": 0.00712,
}
POOL = {
    "tokens": 1024,
    "blocks_by_format": {"fp16": 3, "q8": 1},
    "bytes_mapped": 2**20,
    "perplexity": 14.5,
}
LONG = {"max_bytes": 2**22, "timeline": [POOL, {**POOL, "tokens": 2048}], "end": POOL}
FIGURES: dict[str, dict[str, Any]] = {
    "publishing": {
        "batch": 8,
        "context": 1024,
        "step_s": 0.0211,
        "with_over_without": 1.0042,
        "without_over_without": 1.013,
        "look_cpu_s": 0.00031,
        "busy_share": 0.00062,
        "snapshot_s": 0.0000112,
        "snapshot_blocks": 10_000,
        "reserve_s": 0.0000041,
        "reserve_traced_s": 0.0000052,
    },
    "allocator": {
        "blocks_used": 100_000,
        "blocks_free": 100_000,
        "pairs_per_second": 146_382,
        "bulk_allocated_blocks_per_second": 6_800_797,
        "bulk_released_blocks_per_second": 4_824_961,
        "pair_p50_ns": 7324,
        "pair_p99_ns": 10260,
        "pair_p99.9_ns": 88604,
        "fork_of_128_blocks_ns": 21324,
        "targets": {
            "pairs_per_second": 150_000,
            "bulk_allocated_blocks_per_second": 1_000_000,
            "bulk_released_blocks_per_second": 1_000_000,
        },
    },
    "growth": {
        "tokens": 16_384,
        "tokens_per_step": {"decode": 1, "prefill": 2_048},
        "decode": {"KVCache": GROWN, "pages": GROWN},
        "prefill": {"KVCache": GROWN, "pages": GROWN},
    },
    "batch_operations": {
        "tokens": 4_096,
        "lengths": [4_094, 4_062],
        "operations": {
            "merge": {
                "mlx_lm": {"operation": PHASE, "next_write": PHASE},
                "paged": {"operation": PHASE, "next_write": PHASE},
                "ratios": {"operation": {"seconds": 681.2}, "next_write": {"seconds": 0.25}},
            }
        },
    },
    "serving": {
        "model": "stdlib-llama",
        "dtype": "float32",
        "backend": "plain",
        "requests": 32,
        "token_bytes": 6144,
        "requests_with_equal_tokens_in_all_runs": 31,
        "mlx_lm": {**RUN, "peak_kv_bytes": {"nbytes": 3 * 2**20}},
        "paged": {**RUN, "peak_kv_bytes": {"active": 2**20, "mapped": 2**21}},
    },
    "cpu_kernels": {
        "backend": "native",
        "read_bytes_per_second": 40e9,
        "float16": {
            "decode_of_1_at_32k": {"pages_bytes_per_second": 30e9, "times_mlx": 80.4},
            "decode_of_1_at_1k": {"pages_bytes_per_second": 20e9, "times_mlx": 60.0},
            "short_beside_long": {"short_over_long_per_byte": 1.9},
            "decode_of_8_at_32k": {"pages_bytes_per_second": 34e9},
            "prefill": {"pages_flops": 2e11, "share_of_matrix_product": 0.7, "times_mlx": 90.0},
            "write": {"large_pool_seconds": 2e-5, "copy_seconds": 1e-6},
            "overhead": {"at_300_seconds": 8e-5, "at_1_seconds": 6e-5},
            "shuffled_pages": {"shuffled_over_in_order": 1.01, "spread_of_in_order": 1.02},
        },
    },
    "quantised_kernels": {
        "backend": "native",
        **{
            name: {
                "fp16": {"seconds": 5e-5, "times_fp16": 1.0},
                "q8": {"seconds": 4e-5, "times_fp16": 1.25},
                "q4": {"seconds": 2.5e-5, "times_fp16": 2.004},
            }
            for name in (
                "decode_of_1_at_1k",
                "decode_of_8_at_1k",
                "decode_of_1_at_32k",
                "decode_of_8_at_32k",
                "prefill",
                "write_of_1",
                "write_of_512",
            )
        },
        "mlx_lm_of_1_at_32k": {"times_mlx_lm": 1446.9},
    },
    "whole_model": {
        "backend": "native",
        "rows": [
            {
                "model": "stdlib-llama",
                "batch": 8,
                "context": 4096,
                "mlx_lm_tokens_per_second": 100.0,
                "paged_tokens_per_second": 250.0,
                "paged_over_mlx_lm": 2.5,
                "mlx_lm_attention_share": 0.8,
                "paged_attention_share": 0.3,
            }
        ],
    },
    "rings": {
        "backend": "native",
        "memory": [
            {
                "context": 4096,
                "write_chunk": 256,
                "mlx_lm_bytes": 2**20,
                "paged_bytes": 2**21,
            }
        ],
        "decode": [{}, {"context": 2048, "microseconds": 20.5}],
        "prefill": {
            "tokens": 8192,
            "mlx_lm_seconds": 30.0,
            "paged_seconds": 6.0,
            "mlx_lm_peak_bytes": 2**22,
            "paged_peak_bytes": 2**20,
        },
        "allocations": {"decoded": 10000, "allocations": 0},
    },
    "prefix_reuse": {
        "backend": "native",
        "time_to_first_token": {
            "common_tokens": 3500,
            "new_tokens": 32,
            "mlx_lm_cold_seconds": 20.0,
            "mlx_lm_warm_seconds": 0.2,
            "paged_cold_seconds": 4.0,
            "paged_warm_seconds": 0.125,
        },
        "conversation": {"turns": 20, "share_found": 0.96},
        "together": {
            "requests": 32,
            "own_tokens": 16,
            "prefix_tokens": 2048,
            "mlx_lm_seconds": 20.0,
            "paged_seconds": 5.0,
            "most_blocks_used": 41,
            "blocks_of_one_prefix": 8,
            "blocks_of_tails": 32,
        },
        "fork": {"tokens": 32768, "seconds": 1e-4},
        "look_up": {"tokens": 8192, "blocks": 100_000, "seconds": 1e-3},
    },
    "quantised_quality": {
        "backend": "plain",
        "tokens": 20480,
        "bytes": {
            "fp16": {"token_bytes": 3072.0, "bits_per_value": 16.0, "times_smaller": 1.0},
            "q4": {"token_bytes": 864.0, "bits_per_value": 4.5, "times_smaller": 3.5556},
        },
        "text": {"stdlib-llama": {"rows": {"fp16": LOST, "auto": LOST, "q4": LOST}}},
        "greedy": {"generated": 128, "rows": {"stdlib-llama": {"q4": {"median": 17.5}}}},
        "outliers": {"times_larger": 16, "rows": {"fp16": LOST, "q4": LOST}},
        "long": {
            "tokens": 16384,
            "runs": {
                "fp16": {**LONG, "perplexity": 12.0},
                "auto": {**LONG, "perplexity": 12.125},
                "recent=1": {**LONG, "exhausted": "1 blocks were needed"},
            },
        },
    },
    "page_store": {
        "prompt_tokens": 4096,
        "first_token": {
            "float32": {
                "cold_seconds": 5.0,
                "disk_seconds": 0.25,
                "cold_over_disk": 20.0,
                "open_and_close_seconds": 0.1,
                "share_left_in_page_cache": 0.0,
                "logits_are_equal": True,
            }
        },
        "throughput": {
            "share_left_in_page_cache": 0.0,
            **{
                f"{name}_bytes_per_second": 5e8
                for name in ("plain_write", "store_write", "plain_read", "store_read")
            },
            "store_read_from_page_cache_bytes_per_second": 2e9,
        },
        "bytes_per_token": {"q4": {"disk": 880.0, "memory": 864.0}},
    },
    "page_store_faults": {
        "killed": {
            "cycles": 1000,
            "cap": 8388608,
            "most_bytes": 7000000,
            "reads": 30000,
            "wrong_reads": 0,
        },
        "damaged": {"files": 10000, "accepted": 0},
    },
    "model_families": {
        "files": {
            "bitnet": {"gets": "not run", "reason": "runs on Metal only"},
            "gemma2": {
                "gets": "gather",
                "paged_layers": 2,
                "mlx_lm_caches": {},
                "stock_repeats": True,
                "alone": "equal",
                "batch": "equal",
            },
            "gpt_oss": {
                "gets": "paged",
                "paged_layers": 2,
                "mlx_lm_caches": {"RotatingKVCache": 2},
                "stock_repeats": True,
                "alone": "equal",
                "batch": "differs",
            },
            "mamba": {
                "gets": "own",
                "paged_layers": 0,
                "mlx_lm_caches": {"ArraysCache": 2},
                "stock_repeats": False,
                "alone": "equal",
                "batch": "equal",
            },
        }
    },
}
ROWS = {
    "publishing": "| one look, time of the processor | 310.0 µs | 0.06% of the time |",
    "allocator": "| one block allocated and released | 146,382 a second | 150,000 |",
    "growth": "| decode, 1 a step: pages | 512.0 MiB | 1.0 MiB | 3,072.0 MiB | 0.64 ms | 980 ms |",
    "batch_operations": "| merge | 2 ms | 2 ms | 681 | 1.0 MiB | 1.0 MiB | 8 of 128 |",
    "serving": "| peak of keys and values | 3.0 MiB | 1.0 MiB in use, 2.0 MiB mapped |",
    "cpu_kernels": "| float16: write of 8 tokens | 20.0 µs | 1.0 µs to copy the bytes |",
    "quantised_kernels": "| decode of 8 rows at 32K | 50.0 µs | 1.25 | 2.00 |",
    "whole_model": "| stdlib-llama, batch 8, context 4,096 | 100 | 250 | 2.5 | 80% | 30% |",
    "rings": "| a sequence of 4,096 tokens, write_chunk 256 | 1.0 MiB | 2.0 MiB |",
    "prefix_reuse": "| their blocks in use |  | 41 of 40 needed |",
    "quantised_quality": "| q4 | 864 (1 / 3.56) | 4.5 | +0.65 ± 0.08 % | 7.1e-03 | 17.5 of 128 |",
    "page_store": "| float32: first token of 4,096 tokens, from disk | 250 ms | 5,000 ms cold, "
    "20 times; logits equal |",
    "page_store_faults": "| writers killed at a random moment | 1,000 |",
    "model_families": "- **Attention reads pages** (1): `gpt_oss`",
}


def written(
    folder: Path, bench: str, *, name: str = "", chip: str = "Chip", mlx: str = "0.32.4"
) -> None:
    """A results file as benches write it."""
    content = {
        "bench": bench,
        "machine": {**MACHINE, "chip": chip},
        "versions": {**VERSIONS, "mlx": mlx},
        "figures": FIGURES[bench],
    }
    (folder / f"{name or bench}.json").write_text(json.dumps(content))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with a results file of every bench."""
    for bench in FIGURES:
        written(tmp_path, bench)
    return tmp_path


def marked(name: str, body: str = "") -> str:
    return f"before\n<!-- table: {name} -->\n{body}<!-- end -->\nafter\n"


def test_every_table_is_tested() -> None:
    assert TABLES.keys() == FIGURES.keys() == ROWS.keys()


@pytest.mark.parametrize("name", FIGURES)
def test_table_stands_between_its_markers(name: str, results: Path) -> None:
    text = rewritten(marked(name, "what was here before\n"), results)
    assert text.startswith(f"before\n<!-- table: {name} -->\n\n")
    assert text.endswith("*\n\n<!-- end -->\nafter\n")
    assert ROWS[name] in text.splitlines()
    assert "what was here before" not in text


@pytest.mark.parametrize("name", FIGURES)
def test_again_changes_nothing(name: str, results: Path) -> None:
    text = rewritten(marked(name) + marked("growth"), results)
    assert rewritten(text, results) == text


@pytest.mark.parametrize("name", ["allocator", "growth", "batch_operations", "serving"])
def test_rows_are_as_long_as_their_head(name: str) -> None:
    lines = [line for line in TABLES[name](FIGURES[name]).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


def test_text_without_markers_stays() -> None:
    assert rewritten("no tables\n", Path("nowhere")) == "no tables\n"


def test_machine_and_versions_follow_the_table(results: Path) -> None:
    line = (
        "*Chip, 2 cores, 24 GiB, Linux x86_64; "
        "python 3.11.7, mlx 0.32.4, mlx-lm 0.32.2, numpy 2.4.6.*"
    )
    assert measured_on({"machine": MACHINE, "versions": VERSIONS}) == line
    assert section("growth", results).endswith(f"|\n\n{line}\n\n")


def test_serving_says_how_many_requests_are_equal() -> None:
    assert TABLES["serving"](FIGURES["serving"]).endswith("equal in 31 of 32 requests.")


def test_quality_says_how_long_runs_ended() -> None:
    lines = TABLES["quantised_quality"](FIGURES["quantised_quality"]).splitlines()
    assert "| fp16 | 3,072 (1 / 1) | 16 | 12.500 |  |  |" in lines
    assert "| auto |  |  | +0.65 ± 0.08 % | 7.1e-03 |  |" in lines
    assert "| 2,048 | 3 | 1 | 0 | 1.0 MiB | 14.50 | 14.50 |" in lines
    assert "After 1,024 tokens: perplexity of all 12.12, 12.00 with 16-bit pages." in lines
    assert "After 1,024 tokens: 1 blocks were needed" in lines


def test_model_families_are_grouped_and_exceptions_named() -> None:
    assert TABLES["model_families"](FIGURES["model_families"]).splitlines() == [
        "- **Attention reads pages** (1): `gpt_oss`",
        "- **Pages, gathered for attention of the model's own** (1): `gemma2`",
        "- **Nothing to page, mlx-lm's caches only** (1): `mamba`",
        "- **Not run** (1): `bitnet` (runs on Metal only)",
        "",
        "- Layers that keep mlx-lm's RotatingKVCache beside pages (1): `gpt_oss`",
        "- Tokens of prompts alone: equal to mlx-lm's in 3 of 3 files",
        "- Tokens of a ragged batch: equal to mlx-lm's batch and to its prompts alone "
        "in 2 of 3 files",
        "  - differs: `gpt_oss`",
        "- mlx-lm itself gives other tokens when asked again: `mamba`",
    ]


def test_only_the_newest_versions_are_shown(results: Path) -> None:
    written(results, "growth", name="growth-z", mlx="0.32.10")
    written(results, "growth", name="growth-a", mlx="0.32.10", chip="Other")
    shown = newest("growth", results)
    assert [result["machine"]["chip"] for result in shown] == ["Other", "Chip"]
    assert {result["versions"]["mlx"] for result in shown} == {"0.32.10"}
    assert section("growth", results).count("16,384 tokens") == 2


def test_unknown_table_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="no table 'speed': use one of allocator, batch_op"):
        rewritten(marked("speed"), results)


def test_missing_result_names_the_bench_to_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run python -m benches[.]growth"):
        rewritten(marked("growth"), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: growth -->\n",
        "<!-- end -->\n",
        "<!-- table: growth -->\n" + marked("growth"),
        marked("growth") + "<!-- table: growth -->\n",
    ],
)
def test_markers_come_in_pairs(text: str, results: Path) -> None:
    with pytest.raises(ValueError, match="needs an end"):
        rewritten(text, results)


def test_outdated_readme_is_found_and_mended(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no tables\n")
    monkeypatch.setattr("benches.readme_tables.README", readme)
    assert main(["--check"]) == 0
    monkeypatch.setattr("benches.readme_tables.rewritten", lambda text: "tables\n")
    assert main(["--check"]) == 1
    assert "not up to date" in capsys.readouterr().err
    assert readme.read_text() == "no tables\n"
    assert main([]) == 0
    assert readme.read_text() == "tables\n"
    assert main(["--check"]) == 0


def test_readme_is_up_to_date() -> None:
    assert main(["--check"]) == 0
