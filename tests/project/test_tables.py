"""The tables of README.md and docs/ come from results files and are up to date."""

import json
import re
from pathlib import Path

import pytest

from benches import results_file
from benches.prose_numbers import DIGESTS, NUMBERS
from benches.results_file import RESULTS
from benches.tables import (
    TABLES,
    documents,
    main,
    newest,
    rewritten,
    section,
)
from paged_kv.integrations.bench.report import measured_on
from tests.support.bench_figures import FIGURES

MACHINE = {
    "chip": "Chip",
    "cores": "2 cores",
    "memory_bytes": 24 * 2**30,
    "system": "Linux x86_64",
}
VERSIONS = {"python": "3.11.7", "mlx": "0.32.4", "mlx-lm": "0.32.2", "numpy": "2.4.6"}
ROWS = {
    "publishing": "| one look, CPU time | 310.0 µs | 0.06% of the time |",
    "allocator": "| one block allocated and released | 146,382 a second | 150,000 |",
    "growth": "| decode, 1 a step: pages | 536.9 MB | 1.0 MB | 3,221.2 MB | 0.64 ms | 980 ms |",
    "batch_operations": "| merge | 2 ms | 2 ms | 681 | 1.0 MB | 1.0 MB | 8 of 128 |",
    "admission": "| 200 requests, answers of max_tokens, 512 | 1.0 | 6.4 | 2.5 | 3 |",
    "serving": "| peak of keys and values | 3.1 MB | 1.0 MB in use, 2.1 MB mapped |",
    "serving_http": "| generated tokens a second, all clients | 50 | 123 |",
    "serving_shared": "| known to it: paged-kv server | 123 | 2.47 | 12 ms | 250 ms |",
    "server_soak": "| resident memory | 200.0 MB | 210.0 MB |",
    "freed_buffers": "| stdlib-llama: **a prompt step, 40.0 MB** | 0.99 | 39.0 MB | 60.0 MB "
    "| 90.0 MB |",
    "live_arrays": "| 300,000 | 275 | 240 |",
    "cpu_kernels": "| float16: write of 8 tokens | 20.0 µs | 1.0 µs to copy the bytes |",
    "distributed": "| 2 | 1.0 MB | 116 (111 to 148) |",
    "shared_pages": "| float16: 8 rows behind 512 | 5 ms | 10 ms | 2.00 | 1.0 MB | 8.0 MB |  |",
    "chosen_speed": "| q8, 32K tokens, 1/16 read | 5 ms | 1 ms | 0.4 ms | 5.0 |",
    "chosen_quality": "| smollm2: summaries, 1/4 read | +1.2 ± 0.5 % |",
    "head_drafts": "| stdlib-llama, source: head, 8 rows | 1.23 | 1.01 | 1.85 |",
    "offloaded_contexts": "| smollm2: 1/3 in memory, not waiting | +0.8 ± 0.5 % | 42 | 6 | 1.25 |",
    "latent_attention": "| float16: 1 row at 32K | 500 ms | 100.0 GFLOP/s | 46 | 0.90 |",
    "quantised_kernels": "| decode of 8 rows at 32K | 50.0 µs | 1.25 | 2.00 |",
    "host_cost": "| metal, batch 8, context 300 | 80.0 µs | 100.0 µs | 0.8 | 1 | 7,349 |  |  |",
    "gpu": "| decode, 8 rows at 8,192, fp16 | 20 ms | 10 ms | 2.00 |",
    "whole_model": "| stdlib-llama, batch 8, context 4,096 | 100 | 250 | 2.5 | 0.9 | 80% | 30% |",
    "rings": "| held for 4,096 tokens, write_chunk 256 | 1.0 MB | 2.1 MB |",
    "appended_rows": "| decode step | 100 ms | 80 ms | 1.25 |",
    "eviction": "| Mooncake, conversations | 8,000 | 0.100 | 0.100 | 0.100 | 0.200 | 0.400 |",
    "replicas": "| Mooncake, conversations | 16 | 0.054 | 0.180 | 0.216 | 6.00 / 3.50 / 31.00 s "
    "| 6.00 / 3.50 / 31.00 s |",
    "state_reuse": "| `mamba` | 8.0 s | 10 ms | 12 ms | 800 | 6,144 | 0 | 1.0 MB |",
    "prefix_reuse": "| their blocks in use |  | 41 of 40 needed |",
    "held_bytes": "| 4,097 tokens, 8 rows | 9.00 (+16%) | 5.20 (+16%) | 9.50 | 16.00 "
    "| 9.00 | 5.20 |",
    "page_codecs": "| q4 | 4.65 | +0.17 ± 0.13 % | 1.1e-03 | 4.65 | +0.17 ± 0.13 % | 1.1e-03 |",
    "real_model_quality": "| smollm2, 2,048 tokens: q4 | +0.75 ± 0.14 % | +0.87 % | +0.71 % "
    "| +0.66 % | 95.5 % | 1.2e-02, 2.0e-01 |",
    "real_recall": "| smollm2, call, 4,096 tokens | 12 of 15 | 10 of 15 |  |",
    "real_tokens": "| smollm2, float16: pages, batch | 1 of 8 | 250 | 0.012 |",
    "page_store": "| float32: first token of 4,096 tokens, from disk | 250 ms | 5,000 ms cold, "
    "20 times; logits equal |",
    "page_store_faults": "| writers killed at a random moment | 1,000 |",
    "tiers": "| share of their rate that these texts lose meanwhile | 0% | 90% in one process |",
    "tier_faults": "| of them accepted | 0 |",
    "store_writes": "| chat | 32,768 | 25% of bytes, 98.7% of hits |",
    "model_families": "- **Attention reads pages** (1): `gpt_oss`",
    "step_lengths": "| stdlib-gemma3: 7 | 9.4e-06 | 3.0e-03 | 102 and 102 | 8.1e-06 |",
    "speculation": "| a list to continue, 8 rows | 205 | 1.25 | 800 | 600 |",
    "structured output": "| contains | 17 |",
    "vision_families": "- Tokens of a batch: equal to mlx-vlm's in 1 of 2",
}


def written(
    folder: Path, bench: str, *, name: str = "", chip: str = "Chip", mlx: str = "0.32.4"
) -> None:
    """A results file in the format of the benches."""
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
        "Chip, 2 cores, 24 GiB, Linux x86_64; python 3.11.7, mlx 0.32.4, mlx-lm 0.32.2, numpy 2.4.6"
    )
    assert measured_on({"machine": MACHINE, "versions": VERSIONS}) == line
    assert section("growth", results).endswith(f"|\n\n*{line}.*\n\n")


def test_serving_says_how_many_requests_are_equal() -> None:
    assert TABLES["serving"](FIGURES["serving"]).endswith("equal in 31 of 32 requests.")


def test_model_families_are_grouped_and_exceptions_named() -> None:
    assert TABLES["model_families"](FIGURES["model_families"]).splitlines() == [
        "- **Attention reads pages** (1): `gpt_oss`",
        "- **Attention reads pages while decoding** (1): `deepseek_v3`",
        "- **Pages, gathered for attention of the model's own** (1): `gemma2`",
        "- **No pages: prompts resume from snapshots of states** (1): `mamba` (`ArraysCache`)",
        "- **Not run** (1): `bitnet` (runs on Metal only)",
        "",
        "- Layers that keep mlx-lm's RotatingKVCache beside pages (1): `gpt_oss`",
        "- Tokens of prompts alone: equal to mlx-lm's in 4 of 4 files",
        "- Tokens of a ragged batch: equal to mlx-lm's prompts alone in 3 of 4 files",
        "  - other tokens: `gpt_oss`",
        "- The same of mlx-lm's own batches in 1 of 4 files",
        "  - cannot be batched: `gemma2`",
        "  - other tokens: `gpt_oss`, `mamba`",
        "- mlx-lm itself gives other tokens when asked again: `mamba`",
        "- Decode steps are compiled, with the same tokens, in 1 of 3 files with pages",
        "  - it asks for numbers in the middle of a step: `gpt_oss`",
        "  - tokens differ: `gemma2`",
    ]


def test_only_the_newest_versions_are_shown(results: Path) -> None:
    written(results, "growth", name="growth-z", mlx="0.32.10")
    written(results, "growth", name="growth-a", mlx="0.32.10", chip="Other")
    shown = newest("growth", results)
    assert [result["machine"]["chip"] for result in shown] == ["Other", "Chip"]
    assert {result["versions"]["mlx"] for result in shown} == {"0.32.10"}
    assert section("growth", results).count("16,384 tokens") == 2


def test_recall_sums_what_both_caches_read() -> None:
    last = TABLES["real_recall"](FIGURES["real_recall"]).splitlines()[-1]
    assert last == "Of those that fp16 pages give: q4: 36 of 48; mlx-lm 4 bits: 4 of 24."


def test_unknown_table_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="no table 'speed': use one of admission, allocator"):
        rewritten(marked("speed"), results)


def test_missing_result_names_the_bench_to_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run python -m benches[.]growth"):
        rewritten(marked("growth"), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: growth -->\n",
        "<!-- end -->\n",
        "<!-- number: model files -->5\n",
        "<!-- table: growth -->\n" + marked("growth"),
        marked("growth") + "<!-- table: growth -->\n",
    ],
)
def test_markers_come_in_pairs(text: str, results: Path) -> None:
    with pytest.raises(ValueError, match="needs an end"):
        rewritten(text, results)


def test_headlines_come_from_several_benches(results: Path) -> None:
    text = section("headlines", results)
    served = "server, 96 requests of 16 clients: tokens per second"
    assert f"| stdlib-llama, {served} | more | 50 | 123 | 2.47 |" in text
    shared = "stdlib-llama, first token of 8 clients behind the same 1,400 tokens"
    assert f"| {shared}, when those are known | less | 12 ms | 12 ms | 1.00 |" in text
    # The gain is above 1 where pages are better, also where less is.
    assert "| less | 16.2, 20.2 | 5.0, 9.0 | 3.24 |" in text
    assert text.count("*Chip, 2 cores") == 1, "all were measured on one machine"
    assert "**2.5 times** the tokens per second" in section("why", results)


def test_what_is_slower_is_among_the_headlines(results: Path) -> None:
    path = results / "whole_model.json"
    content = json.loads(path.read_text())
    row = {**content["figures"]["rows"][0], "context": 256, "mlx_lm_tokens_per_second": 100.0}
    for rate, gain in ((93.0, 0.998), (97.0, 0.96), (102.0, 0.92)):
        slow = {**row, "paged_tokens_per_second": rate, "paged_over_mlx_lm": gain}
        content["figures"]["rows"].append(slow)
    path.write_text(json.dumps(content))
    text = section("headlines", results)
    # The gain is that of the rates beside it. The third row is noise: its rate is higher, and the
    # median of its ratios below 1.
    assert (
        "| **slower**, the most of 2 of 4 measured: decode, stdlib-llama, batch 8, context 256 "
        "| more | 100 tokens/s | 93 tokens/s | 0.93 |"
    ) in text
    host = "host time of a GPU decode step that is compiled, per layer, without a GPU | less "
    assert f"| {host}| 80 to 80 µs | 40 to 40 µs | 2.00 to 2.00 |" in text
    assert text.count("slower") == 1
    path = results / "host_cost.json"
    content = json.loads(path.read_text())
    content["figures"]["rows"][1]["paged_microseconds"] = 100.0
    path.write_text(json.dumps(content))
    assert f"| **slower**: {host}| 80 to 80 µs | 100 to 100 µs | 0.80 to 0.80 |" in section(
        "headlines", results
    )


NUMBERS_OF_SAMPLES = {
    "model files": "5",
    "model files with pages": "3",
    "model files that decode from pages": "2",
    "least decode gain": "2.50",
    "steps of a recording": "8",
    "steps of a comparison": "32",
    "files with compiled steps": "1",
    "bits of q4": "5.20",
    "loss of q8": "0.02 % (smollm2)",
    "loss of q8/q4": "0.13 % (smollm2)",
    "loss of q4": "0.75 % (smollm2)",
    "prompt speed of q8": "0.96",
    "prompt speed of q4": "0.91",
    "bytes of mlx-lm's windows": "1.0 MB",
    "bytes of rings": "2.1 MB",
    "share of monitoring": "0.1%",
    "time of look-up": "1 ms",
    "hits at once, small memory": "20 %",
    "hits at once, large memory": "2 %",
    "bytes at once": "25 %",
    "gain of optimistic admission": "2.5",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_stands_within_its_sentence(name: str, results: Path) -> None:
    told = NUMBERS_OF_SAMPLES[name]
    text = f"has <!-- number: {name} -->{{}}<!-- end --> of them\n" + marked("growth")
    assert rewritten(text.format("17"), results).startswith(text.format(told).partition("\n")[0])


def test_every_number_stands_in_a_document() -> None:
    text = "".join(path.read_text() for path in documents())
    assert set(re.findall(r"<!-- number: (.*?) -->", text)) == NUMBERS.keys()


def test_unknown_number_is_refused(results: Path) -> None:
    with pytest.raises(ValueError, match="no number 'speed': use one of bits of q4, bytes"):
        rewritten("<!-- number: speed -->1<!-- end -->", results)


def test_every_table_stands_in_one_document() -> None:
    text = "".join(path.read_text() for path in documents())
    assert sorted(re.findall(r"<!-- table: (.*?) -->", text)) == sorted([*TABLES, *DIGESTS])


def test_digests_name_their_benches() -> None:
    assert {bench for _, benches in DIGESTS.values() for bench in benches} <= TABLES.keys()


def test_an_outdated_document_is_found_and_mended(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no tables\n")
    monkeypatch.setattr("benches.tables.documents", lambda: [readme])
    assert main(["--check"]) == 0
    monkeypatch.setattr("benches.tables.rewritten", lambda text: "tables\n")
    assert main(["--check"]) == 1
    assert "README.md is not up to date" in capsys.readouterr().err
    assert readme.read_text() == "no tables\n"
    assert main([]) == 0
    assert readme.read_text() == "tables\n"
    assert main(["--check"]) == 0


def test_documents_are_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_each_model_file_that_is_gathered_says_why() -> None:
    (result,) = newest("model_families", RESULTS)
    files = result["figures"]["files"].values()
    reasons = [entry.get("reason") for entry in files if entry["gets"] == "gather"]
    assert len(reasons) <= 4
    assert not {None, "not known yet"} & set(reasons)


LEAST_COMPILED = 110


def test_each_model_file_with_pages_compiles_its_steps_or_says_why() -> None:
    (result,) = newest("model_families", RESULTS)
    files = result["figures"]["files"].values()
    paged = [entry for entry in files if entry.get("paged_layers")]
    assert {entry["compiled_tokens"] for entry in paged} == {"equal"}
    assert sum(entry["compiled"] == "yes" for entry in paged) >= LEAST_COMPILED


def test_results_files_hold_each_list_on_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    figures = {"curve": [1, 2.5, 3], "names": ["a, b", "c"], "rows": [{"a": 1}, {"a": []}]}
    text = results_file.write_result("growth", figures).read_text()
    assert json.loads(text)["figures"] == figures
    assert '"curve": [1, 2.5, 3],\n' in text
    assert '"names": ["a, b", "c"],\n' in text
