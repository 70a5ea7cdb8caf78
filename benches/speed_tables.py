"""Makes the tables of times and rates: of kernels, caches, models and servers."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benches.table_cells import (
    count,
    giga,
    megabytes,
    micros,
    millis,
    percent,
    seconds,
    spaced,
    table,
    three_digits,
)

Figures = dict[str, Any]
Row = tuple[str, str, str]


def cpu_kernels(figures: Figures) -> str:
    """Attention over pages and writes into them, beside MLX, the memory and the processor."""
    bandwidth = figures["read_bytes_per_second"]
    rows: list[Row] = []
    for dtype in [name for name in figures if isinstance(figures[name], dict)]:
        rows += _decode_rows(dtype, figures[dtype], bandwidth)
        rows += [
            _short_row(dtype, figures[dtype]["short_beside_long"]),
            _prefill_row(dtype, figures[dtype]["prefill"]),
        ]
        rows += _step_rows(dtype, figures[dtype])
    beside = f"beside; two threads read {giga(bandwidth, 'B/s')}"
    return table((f"{figures['backend']} backend", "measured", beside), rows)


def publishing(figures: Figures) -> str:
    """Monitoring overhead."""
    step = 1e3 * figures["step_s"]
    slower, apart = figures["with_over_without"] - 1, figures["without_over_without"] - 1
    rows: list[Row] = [
        (
            "decode step with monitoring, against without",
            f"{slower:+.1%}",
            f"{step:.1f} ms",
        ),
        ("without, against without again", f"{apart:+.1%}", "noise of the measurement"),
        (
            "one look, CPU time",
            micros(1e9 * figures["look_cpu_s"]),
            f"{figures['busy_share']:.2%} of the time",
        ),
        (
            "a snapshot",
            micros(1e9 * figures["snapshot_s"]),
            f"{figures['snapshot_blocks']:,} blocks",
        ),
    ]
    return table(
        (f"batch {figures['batch']}, context {figures['context']:,}", "measured", ""), rows
    )


def _decode_rows(dtype: str, of: Figures, bandwidth: float) -> Iterator[Row]:
    for label, name in (
        ("1 row at 32K", "decode_of_1_at_32k"),
        ("1 row at 1K", "decode_of_1_at_1k"),
        ("8 rows at 32K", "decode_of_8_at_32k"),
    ):
        rate = of[name]["pages_bytes_per_second"]
        # Measured in turns where it is there: the machine's speed drifts.
        share = of[name].get("share_of_bandwidth", rate / bandwidth)
        beside = f"{percent(share)} of what is read"
        if "times_mlx" in of[name]:
            beside += f", {three_digits(of[name]['times_mlx'])} times MLX"
        yield f"{dtype}: decode of {label}", giga(rate, "B/s"), beside


def _short_row(dtype: str, short: Figures) -> Row:
    times = f"{short['short_over_long_per_byte']:.2f} times"
    return f"{dtype}: time per KV byte, 1K against 32K", times, "in turns, with cold caches"


def _prefill_row(dtype: str, prefill: Figures) -> Row:
    share = percent(prefill["share_of_matrix_product"])
    beside = f"{share} of a matrix product, {three_digits(prefill['times_mlx'])} times MLX"
    return f"{dtype}: prefill of 512 on 4K", giga(prefill["pages_flops"], "FLOP/s"), beside


def _step_rows(dtype: str, of: Figures) -> Iterator[Row]:
    write, step, order = of["write"], of["overhead"], of["shuffled_pages"]
    copied = f"{micros(1e9 * write['copy_seconds'])} to copy the bytes"
    yield f"{dtype}: write of 8 tokens", micros(1e9 * write["large_pool_seconds"]), copied
    at_1 = f"{micros(1e9 * step['at_1_seconds'])} at 1 token"
    yield f"{dtype}: write and decode at 300", micros(1e9 * step["at_300_seconds"]), at_1
    mixed = f"{order['shuffled_over_in_order']:.2f} times"
    itself = f"{order['spread_of_in_order']:.2f} of the latter against itself"
    yield f"{dtype}: shuffled pages over pages in order", mixed, itself


def _model_rows(batch: str, figures: Figures) -> Iterator[tuple[str, ...]]:
    """CPU time of a prompt and of a decode step that recodes pages, beside those of 16 bits."""
    for label, part, beside in (
        ("prompt of 1,100", "prefill", "prefill"),
        ("decode step that recodes", "recoding", "decode"),
    ):
        plain = figures["fp16"][beside]
        ratios = [f"{plain / figures[name][part]:.2f}" for name in ("q8", "q4")]
        yield f"stdlib-llama, {batch}: {label}", millis(plain), *ratios


def quantised_kernels(figures: Figures) -> str:
    """Steps on pages of fewer bits, beside those of 16."""
    labels = {
        "decode_of_1_at_1k": "decode of 1 row at 1K",
        "decode_of_8_at_1k": "decode of 8 rows at 1K",
        "decode_of_1_at_32k": "decode of 1 row at 32K",
        "decode_of_8_at_32k": "decode of 8 rows at 32K",
        "prefill": "prefill of 512 on 4K",
        "prompt_of_512": "prompt of 512: write, attend and recode",
    }
    rows = [
        (
            label,
            micros(1e9 * figures[name]["fp16"]["seconds"]),
            *(f"{figures[name][each]['times_fp16']:.2f}" for each in ("q8", "q4")),
        )
        for name, label in labels.items()
    ]
    rows += [*_model_rows("1 row", figures["model_of_1"])]
    rows += [*_model_rows("8 rows", figures["model_of_8"])]
    stock = three_digits(figures["mlx_lm_of_1_at_32k"]["times_mlx_lm"])
    rows.append(("decode of 1 row at 32K, times as fast as mlx-lm with 4 bits", "", "", stock))
    head = ("fp16", "q8: times as fast", "q4: times as fast")
    return table((f"{figures['backend']} backend", *head), rows)


def shared_pages(figures: Figures) -> str:
    """Decode of rows that share pages, read together and apart; and the look for shared pages."""
    rows = []
    for dtype in ("bfloat16", "float16"):
        for name, of in figures[dtype].items():
            rows.append(
                (
                    f"{dtype}: {spaced(name)}",
                    millis(of["together_seconds"]),
                    millis(of["apart_seconds"]),
                    f"{of['times']:.2f}",
                    megabytes(of["together_bytes"]),
                    megabytes(of["apart_bytes"]),
                    f"{of['in_pairs_times']:.2f}" if "in_pairs_times" in of else "",
                )
            )
    head = ("together", "apart", "times as fast", "read together", "read apart", "avx512bf16")
    tree = figures["tree"]
    look = (
        f"The look for shared pages, {figures['tree_rows']} tables of {figures['tree_pages'] + 1} "
        f"blocks: {micros(1e9 * tree['look_seconds'])}; "
        f"{micros(1e9 * tree['nothing_changed_seconds'])} where no table has changed."
    )
    return table((f"{figures['instruction_set']} kernels", *head), rows) + f"\n\n{look}"


def chosen_speed(figures: Figures) -> str:
    """Decode that reads a share of the tokens, beside exact attention."""
    rows = [
        (
            _share_read(row["format"], row),
            millis(row["exact_seconds"]),
            millis(row["chosen_seconds"]),
            millis(row["as_short_seconds"]),
            f"{row['times']:.1f}",
        )
        for row in figures["layer"]
    ]
    rows += [
        (
            _share_read("stdlib-llama, a whole step", row),
            millis(row["exact_seconds"]),
            millis(row["chosen_seconds"]),
            "",
            f"{row['times']:.1f}",
        )
        for row in figures["model"]
    ]
    head = ("a step", "all read", "chosen", "as many tokens, not chosen", "times as fast")
    whole = ", ".join(f"{row['format']} {row['times']:.2f}" for row in figures["fits"])
    return f"{table(head, rows)}\n\nWhere all may be read, times as fast: {whole}."


def _share_read(what: str, row: Figures) -> str:
    tokens = row["tokens"]
    return f"{what}, {tokens >> 10}K tokens, 1/{tokens // row['read_tokens']} read"


def latent_attention(figures: Figures) -> str:
    """Decode of latent attention, beside mlx-lm's operations and numpy's products."""
    rows = []
    for dtype in ("bfloat16", "float16"):
        for name, of in figures[dtype].items():
            if not name.startswith("decode_of_"):
                continue
            batch, context = name.removeprefix("decode_of_").split("_at_")
            label = f"{dtype}: {batch} {'row' if batch == '1' else 'rows'} at {context.upper()}"
            flops = giga(of["operations_per_second"], "FLOP/s")
            mlx_lm = three_digits(of["times_mlx_lm"]) if "times_mlx_lm" in of else ""
            beside = mlx_lm, f"{of['times_numpy']:.2f}"
            rows.append((label, millis(of["seconds"]), flops, *beside))
        step = figures[dtype]["step"]
        heads, tokens = figures["step_heads"], figures["step_tokens"]
        label = f"{dtype}: a layer's step, {heads} heads at {tokens}"
        rows.append((label, millis(step["seconds"]), "", three_digits(step["times_mlx_lm"]), ""))
    head = ("time", "speed", "times as fast as mlx-lm", "times as fast as numpy's float32 products")
    return table((f"{figures['backend']} backend", *head), rows)


def speculation(figures: Figures) -> str:
    """Batches with look-up beside batches without, and batches with a draft model beside mlx-lm's
    rows one after the other."""
    looked_up = [
        (
            f"{task}, {_rows(batch)}",
            three_digits(of["tokens"] / median(of["seconds_without"])),
            f"{of['speed']:.2f}",
            count(of["draft_tokens"]),
            count(of["accepted_tokens"]),
        )
        for key, of in figures["look_up"].items()
        for task, batch in [key.rsplit("_", 1)]
    ]
    drafted = [
        (
            _rows(batch),
            f"{of['speed']:.2f}",
            f"{of['accepted_a_step']:.2f}",
            f"{of['mlx_lm_accepted_a_step']:.2f}",
        )
        for batch, of in figures["model"].items()
    ]
    head = ("tokens a second without drafts", "times that with look-up", "drafted", "accepted")
    beside = ("times mlx-lm's rows in turn", "accepted a step", "mlx-lm's")
    source = f"stdlib-llama, draft model, at {figures['context']:,} tokens"
    return (
        f"{table(('smollm2, prompt look-up', *head), looked_up)}\n\n"
        f"{table((source, *beside), drafted)}"
    )


def head_drafts(figures: Figures) -> str:
    """What look-up, draft models and heads bring."""
    rows = [
        (
            f"{row['task']}: {row['draft']}, {_rows(str(row['rows']))}",
            f"{row['accepted_a_step']:.2f}",
            f"{row['speed']:.2f}",
            f"{row['bound']:.2f}",
        )
        for row in figures["rows"]
    ]
    head = ("drafts", "accepted a step", "times as fast here", "bound by reading, by arithmetic")
    return table(head, rows)


def _rows(batch: str) -> str:
    return "1 row" if batch == "1" else f"{batch} rows"


def whole_model(figures: Figures) -> str:
    """Tokens a second of whole models, and what share of a step attention takes."""
    rows = [
        (
            f"{row['model']}, batch {row['batch']}, context {row['context']:,}",
            three_digits(row["mlx_lm_tokens_per_second"]),
            three_digits(row["paged_tokens_per_second"]),
            three_digits(row["paged_over_mlx_lm"]),
            three_digits(row["mlx_lm_waiting_over_mlx_lm"]),
            percent(row["mlx_lm_attention_share"]),
            percent(row["paged_attention_share"]),
        )
        for row in figures["rows"]
    ]
    turns = ("pages / mlx-lm", "mlx-lm with one wait a layer / mlx-lm")
    speeds = ("mlx-lm", "pages", *(f"{name}, median of turns" for name in turns))
    shares = ("attention in mlx-lm", "attention in pages")
    return table((f"tokens a second, {figures['backend']} backend", *speeds, *shares), rows)


def gpu(figures: Figures) -> str:
    """Checks of the doctor, and decode steps and a prompt on a GPU."""
    checks = figures["checks"]
    passed = f"{sum(each['passed'] for each in checks)} of {len(checks)} checks passed."
    rows = [
        (
            f"decode, {_rows(str(row['batch']))} at {row['context']:,}, {row['pages']}",
            millis(row["mlx_lm_ms"] / 1e3),
            millis(row["paged_ms"] / 1e3),
            f"{row['times_as_fast']:.2f}",
        )
        for row in figures["decode"]
    ]
    rows += [
        (
            f"prompt of {row['prompt']:,} tokens, fp16",
            millis(row["mlx_lm_s"]),
            millis(row["paged_s"]),
            f"{row['times_as_fast']:.2f}",
        )
        for row in figures["prefill"]
    ]
    head = ("Llama 3 8B's shape, bfloat16", "mlx-lm", "pages", "mlx-lm / pages, median of turns")
    return f"{passed}\n\n{table(head, rows)}"


def host_cost(figures: Figures) -> str:
    """What Python spends on a decode step of a layer."""
    rows = [
        (
            f"{row['backend']}, batch {row['batch']}, context {row['context']:,}",
            micros(1e3 * row["mlx_lm_microseconds"]),
            micros(1e3 * row["paged_microseconds"]),
            three_digits(1 / row["paged_over_mlx_lm"]),
            count(row["launches_a_layer"]) if row["launches_a_layer"] else "",
            count(row["decode_characters"]) if row["decode_characters"] else "",
            f"{row['recording_steps']:.1f} steps" if "recording_steps" in row else "",
        )
        for row in figures["rows"]
    ]
    head = ("mlx-lm", "pages", "mlx-lm / pages, median of turns", "launches", "characters of text")
    return table(("a layer's step", *head, "to record"), rows)


def rings(figures: Figures) -> str:
    """What a sliding window takes: bytes of a sequence, time of a step, and of a long prompt."""
    rows = [
        (
            f"held for {row['context']:,} tokens, write_chunk {row['write_chunk']:,}",
            megabytes(row["mlx_lm_bytes"]),
            megabytes(row["paged_bytes"]),
        )
        for row in figures["memory"]
    ]
    rows += [
        (f"a layer's step at {row['context']:,} tokens", "", micros(1e3 * row["microseconds"]))
        for row in figures["decode"][1:]
    ]
    prefill = figures["prefill"]
    prompt = f"a prompt of {prefill['tokens']:,} tokens, stdlib-gemma3 in float32"
    rows += [
        (prompt, seconds(prefill["mlx_lm_seconds"]), seconds(prefill["paged_seconds"])),
        (
            "its peak memory",
            megabytes(prefill["mlx_lm_peak_bytes"]),
            megabytes(prefill["paged_peak_bytes"]),
        ),
    ]
    allocations = figures["allocations"]
    steps = f"blocks allocated in {allocations['decoded']:,} steps of full rings"
    rows.append((steps, "", str(allocations["allocations"])))
    return table(("window of 1,024", "mlx-lm", f"pages, {figures['backend']} backend"), rows)


def prefix_reuse(figures: Figures) -> str:
    """What it saves that prompts share what they begin with."""
    first, talk, batch = (
        figures["time_to_first_token"],
        figures["conversation"],
        figures["together"],
    )
    behind = f"{first['new_tokens']} tokens behind {first['common_tokens']:,}, first token"
    requests = f"{batch['requests']} requests of {batch['own_tokens']} tokens"
    common = f"{requests} behind the same {batch['prefix_tokens']:,}"
    needed = batch["blocks_of_one_prefix"] + batch["blocks_of_tails"]
    fork, look_up = figures["fork"], figures["look_up"]
    rows = [
        (
            f"{behind}, cold",
            millis(first["mlx_lm_cold_seconds"]),
            millis(first["paged_cold_seconds"]),
        ),
        (
            f"{behind}, when those are known",
            millis(first["mlx_lm_warm_seconds"]),
            millis(first["paged_warm_seconds"]),
        ),
        (
            f"conversation of {talk['turns']} turns, prompt tokens found",
            "",
            percent(talk["share_found"]),
        ),
        (common, seconds(batch["mlx_lm_seconds"]), seconds(batch["paged_seconds"])),
        ("their blocks in use", "", f"{batch['most_blocks_used']} of {needed} needed"),
        (f"fork of {fork['tokens']:,} tokens", "", micros(1e9 * fork["seconds"])),
        (
            f"look-up of {look_up['tokens']:,} tokens in {look_up['blocks']:,} blocks",
            "",
            millis(look_up["seconds"]),
        ),
    ]
    pages = f"pages, {figures['backend']} backend"
    return table(("stdlib-llama in float32", "mlx-lm, LRUPromptCache", pages), rows)


def batch_operations(figures: Figures) -> str:
    """Operations on batches and the write behind each, on mlx-lm's caches and on pages."""
    head = ("mlx-lm", "pages", "mlx-lm / pages", "new in mlx-lm", "new in pages", "blocks copied")
    rows = []
    for operation, result in figures["operations"].items():
        for phase, label in (("operation", operation), ("next_write", "its next token")):
            stock, paged = result["mlx_lm"][phase], result["paged"][phase]
            rows.append(
                (
                    label,
                    millis(stock["seconds"]),
                    millis(paged["seconds"]),
                    three_digits(result["ratios"][phase]["seconds"]),
                    megabytes(stock["new_bytes"]),
                    megabytes(paged["new_bytes"]),
                    f"{paged['blocks_copied_change']:.0f} of {paged['blocks_used']:.0f}",
                )
            )
    return table(
        (f"{len(figures['lengths'])} rows of up to {figures['tokens']:,} tokens", *head), rows
    )


def serving(figures: Figures) -> str:
    """One load on mlx-lm's caches and on pages."""
    stock, paged = figures["mlx_lm"], figures["paged"]
    names = {
        "wall_seconds": ("wall time", seconds),
        "prompt_tokens_per_second": ("prompt tokens a second", count),
        "generation_tokens_per_second": ("generated tokens a second", count),
        "all_tokens_per_second": ("all tokens over wall time, a second", count),
        "peak_memory_bytes": ("peak memory, weights included", megabytes),
    }
    rows: list[tuple[str, ...]] = [
        (label, show(stock[name]), show(paged[name])) for name, (label, show) in names.items()
    ]
    kv_bytes = paged["peak_kv_bytes"]
    in_pages = f"{megabytes(kv_bytes['active'])} in use, {megabytes(kv_bytes['mapped'])} mapped"
    rows.append(("peak of keys and values", megabytes(stock["peak_kv_bytes"]["nbytes"]), in_pages))
    held = [megabytes(run["peak_tokens_held"] * figures["token_bytes"]) for run in (stock, paged)]
    rows.append(("what the tokens themselves need", *held))
    load = f"{figures['requests']} requests, {figures['model']} in {figures['dtype']}"
    equal = figures["requests_with_equal_tokens_in_all_runs"]
    return (
        table((load, "mlx-lm", f"pages, {figures['backend']} backend"), rows)
        + f"\n\nTokens are equal in {equal} of {figures['requests']} requests."
    )


def serving_http(figures: Figures) -> str:
    """Two servers under one load."""
    servers = [figures["mlx_lm"], figures["paged"]]
    rates = [three_digits(each["tokens_per_second"]) for each in servers]
    rows: list[tuple[str, ...]] = [("generated tokens a second, all clients", *rates)]
    for name, label in (
        ("first_token_seconds", "first token"),
        ("per_token_seconds", "per token"),
        ("whole_seconds", "whole answer"),
    ):
        for part in ("p50", "p95", "p99"):
            times = [millis(each[name][part]) for each in servers]
            rows.append((f"{label}, {part}", *times))
    load = f"{figures['requests']} requests of {figures['clients']} clients, {figures['model']} in "
    return (
        table((load + figures["dtype"], "mlx_lm.server", "paged-kv server"), rows)
        + f"\n\nTexts are equal in {figures['equal_texts']} of {figures['requests']} requests."
    )


def serving_shared(figures: Figures) -> str:
    """Servers whose clients all ask behind one prompt."""
    rows = []
    for wave, label in (("new", "new to the server"), ("known", "known to it")):
        stock, paged = figures[wave]["mlx_lm"], figures[wave]["paged"]
        for name, side in (("mlx_lm.server", stock), ("paged-kv server", paged)):
            gain = side["tokens_per_second"] / stock["tokens_per_second"]
            first = side["first_token_seconds"]
            cells = (three_digits(side["tokens_per_second"]), f"{gain:.2f}")
            times = (millis(first["p50"]), millis(first["p95"]))
            rows.append((f"{label}: {name}", *cells, *times))
    head = ("tokens a second", "times mlx_lm.server", "first token, p50", "p95")
    load = (
        f"{figures['clients']} clients behind {figures['shared_tokens']:,} shared tokens, "
        f"{figures['model']} in {figures['dtype']}"
    )
    equal, asked = (
        sum(figures[wave][name] for wave in ("new", "known"))
        for name in ("equal_texts", "requests")
    )
    return f"{table((load, *head), rows)}\n\nTexts are equal in {equal} of {asked} requests."


def admission(figures: Figures) -> str:
    """Two policies of admission on the same arrivals."""
    loads = {
        "short answers, max_tokens 1,900": figures["short_answers"]["1900"],
        "short answers, max_tokens 512": figures["short_answers"]["512"],
        "answers of max_tokens, 512": figures["answers_of_max_tokens"],
    }
    rows = []
    for name, load in loads.items():
        runs = [load[policy][-1] for policy in ("reserve", "optimistic")]
        means = [f"{run['running_mean']:.1f}" for run in runs]
        speeds = [three_digits(load["speed_ratio"]), count(runs[1]["preemptions"])]
        rows.append((f"{load['requests']} requests, {name}", *means, *speeds))
    loads_wrong = sum(load["requests_wrong"] for load in loads.values())
    head = ("running, reserve", "running, optimistic", "times the tokens a second", "preemptions")
    pool = f"{figures['model']} in {figures['dtype']}, {megabytes(figures['pool_bytes'])} of pages"
    return table((pool, *head), rows) + f"\n\nRequests with other tokens: {loads_wrong}."


TABLES: dict[str, Callable[[Figures], str]] = {
    each.__name__: each
    for each in (
        batch_operations,
        admission,
        serving,
        serving_http,
        serving_shared,
        cpu_kernels,
        host_cost,
        whole_model,
        gpu,
        speculation,
        head_drafts,
        rings,
        prefix_reuse,
        publishing,
        shared_pages,
        chosen_speed,
        latent_attention,
        quantised_kernels,
    )
}
