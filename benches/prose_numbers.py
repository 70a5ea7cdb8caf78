"""Numbers that stand in the sentences of README.md and docs/, by name, and the digests of several
benches with which README begins."""

from collections.abc import Callable
from typing import Any

from benches.table_cells import count, megabytes, millis, percent, table, three_digits

Figures = dict[str, Any]
Digest = Callable[[dict[str, Figures]], str]
# What was measured, which way is better, both sides, and the gain.
Row = tuple[str, str, str, str, str]
SIDES = ("mlx_lm", "paged")


def why(figures: dict[str, Figures]) -> str:
    """One sentence: what the server gains."""
    served = figures["serving_http"]
    stock, paged = served["mlx_lm"], served["paged"]
    rate = paged["tokens_per_second"] / stock["tokens_per_second"]
    first = stock["first_token_seconds"]["p50"] / paged["first_token_seconds"]["p50"]
    return (
        f"With {served['clients']} clients, `paged-kv server` generated **{rate:.1f} times** the "
        f"tokens per second of `mlx_lm.server`, and the median first token came {first:.1f} times "
        f"as early ({served['model']}, {served['dtype']}, CPU)."
    )


def headlines(figures: dict[str, Figures]) -> str:
    """What speaks for pages, and what speaks against them."""
    decode = figures["whole_model"]["rows"]
    rows = [
        _server(figures["serving_http"]),
        *_shared(figures["serving_shared"]),
        _first_token(figures["prefix_reuse"]),
        _memory(figures["serving"]),
        *_bits(figures["held_bytes"]),
        _decode(max(decode, key=_gain)),
        *_slowest(decode),
        _host(figures["host_cost"]),
    ]
    text = table(("measured", "better", "mlx-lm", "paged_kv", "gain"), rows)
    # The second column is text too.
    return text.replace("| --- | ---: |", "| --- | --- |", 1)


def _server(figures: Figures) -> Row:
    stock, paged = (figures[name]["tokens_per_second"] for name in SIDES)
    load = f"{figures['requests']} requests of {figures['clients']} clients"
    label = f"{figures['model']}, server, {load}: tokens per second"
    return label, "more", three_digits(stock), three_digits(paged), _ratio(paged / stock)


def _shared(figures: Figures) -> list[Row]:
    """The median first token of clients that ask at once, with prompts that begin alike."""
    label = (
        f"{figures['model']}, first token of {figures['clients']} clients behind the same "
        f"{figures['shared_tokens']:,} tokens"
    )
    rows = []
    for wave, end in (("new", ""), ("known", ", when those are known")):
        stock, paged = (figures[wave][side]["first_token_seconds"]["p50"] for side in SIDES)
        rows.append((label + end, "less", millis(stock), millis(paged), _ratio(stock / paged)))
    return rows


def _first_token(figures: Figures) -> Row:
    first = figures["time_to_first_token"]
    stock, paged = first["mlx_lm_cold_seconds"], first["paged_cold_seconds"]
    tokens = first["common_tokens"] + first["new_tokens"]
    label = f"stdlib-llama, first token of a new prompt of {tokens:,} tokens"
    return label, "less", millis(stock), millis(paged), _ratio(stock / paged)


def _memory(figures: Figures) -> Row:
    stock = figures["mlx_lm"]["peak_kv_bytes"]["nbytes"]
    paged = figures["paged"]["peak_kv_bytes"]["mapped"]
    label = f"peak memory of keys and values, {figures['requests']} requests of mixed lengths"
    return label, "less", megabytes(stock), megabytes(paged), _ratio(stock / paged)


def _bits(figures: Figures) -> list[Row]:
    """What MLX holds for one sequence, in each format."""
    found = figures["one_row"]
    span = f"{figures['shortest'] // 1024}K to {figures['headline'] // 1024}K tokens"

    def cell(name: str) -> str:
        return f"{found[name]['mean_bits_to_32k']:.1f}, {found[name]['worst_bits_to_32k']:.1f}"

    stock = found["mlx-lm"]["mean_bits_to_32k"]
    return [
        (
            f"bits held for a number, {name} pages, one sequence of {span}: mean, worst",
            "less",
            cell("mlx-lm"),
            cell(name),
            _ratio(stock / found[name]["mean_bits_to_32k"]),
        )
        for name in ("fp16", "q8", "q4")
    ]


def q4_bits(figures: Figures) -> tuple[int, float]:
    """The longest sequence of up to 32K tokens, and the bits held for a number: the page that is
    written has 16 bits, so a short sequence takes more."""
    rows = figures["by_length"]["llama"]["q4"]
    alone = {row["tokens"]: row["bits"] for row in rows if row["rows"] == 1}
    tokens = max(length for length in alone if length <= 32 * 1024 + 1)
    return tokens, alone[tokens]


def _gain(row: Figures) -> float:
    """Of the two rates that stand beside it."""
    return float(row["paged_tokens_per_second"] / row["mlx_lm_tokens_per_second"])


def _slowest(rows: list[Figures]) -> list[Row]:
    """The whole model that loses most, if any does. The ratio of medians and the median of the
    ratios of turns may part by noise: slower is what both say."""
    slower = [row for row in rows if _gain(row) < 1 and row["paged_over_mlx_lm"] < 1]
    mark = f"**slower**, the most of {len(slower)} of {len(rows)} measured: "
    return [_decode(min(slower, key=_gain), mark)] if slower else []


def _decode(row: Figures, mark: str = "") -> Row:
    label = f"{mark}decode, {row['model']}, batch {row['batch']}, context {row['context']:,}"
    rates = [row["mlx_lm_tokens_per_second"], row["paged_tokens_per_second"]]
    stock, paged = (f"{rate:,.3g} tokens/s" for rate in rates)
    return label, "more", stock, paged, _ratio(_gain(row))


def _host(figures: Figures) -> Row:
    """Only the rows that GPUs take by themselves: there a step cannot be faster than the program
    that builds it."""
    rows = [row for row in figures["rows"] if row["backend"].endswith("compiled")]
    stock, paged = ([row[f"{name}_microseconds"] for row in rows] for name in ("mlx_lm", "paged"))
    gains = [one / other for one, other in zip(stock, paged, strict=True)]
    mark = "" if min(gains) >= 1 else "**slower**: "
    return (
        f"{mark}host time of a GPU decode step that is compiled, per layer, without a GPU",
        "less",
        _span(stock),
        _span(paged),
        f"{_ratio(min(gains))} to {_ratio(max(gains))}",
    )


def _span(microseconds: list[float]) -> str:
    return f"{count(min(microseconds))} to {count(max(microseconds))} µs"


def _ratio(number: float) -> str:
    return f"{number:.2f}"


# What makes each, and the benches that it takes its numbers from.
DIGESTS: dict[str, tuple[Digest, tuple[str, ...]]] = {
    "why": (why, ("serving_http",)),
    "headlines": (
        headlines,
        (
            "serving_http",
            "serving_shared",
            "prefix_reuse",
            "serving",
            "held_bytes",
            "whole_model",
            "host_cost",
        ),
    ),
}


def _files_that_get(*kinds: str) -> Callable[[Figures], str]:
    return lambda figures: str(sum(each["gets"] in kinds for each in figures["files"].values()))


def _least_gain(figures: Figures) -> str:
    return _ratio(min(map(_gain, figures["rows"])))


def _loss_of(page_format: str) -> Callable[[Figures], str]:
    """How much larger the perplexity of real models is than with pages of 16 bits, over the most
    tokens that were read."""

    def told(figures: Figures) -> str:
        rows = [row for row in figures["rows"] if row["cache"] == page_format]
        longest = {row["model"]: row for row in sorted(rows, key=lambda row: row["tokens"])}
        return " and ".join(
            f"{row['loss_percent']:.2f} % ({model})" for model, row in sorted(longest.items())
        )

    return told


def _prompt_speed_of(page_format: str) -> Callable[[Figures], str]:
    """Reading a prompt, beside pages of 16 bits: above 1 is quicker."""

    def told(figures: Figures) -> str:
        plain, quantised = (
            figures["model_of_1"][name]["prefill"] for name in ("fp16", page_format)
        )
        return f"{plain / quantised:.2f}"

    return told


def _ring_bytes(cache: str) -> Callable[[Figures], str]:
    """Of the shortest sequence, with the write_chunk that is used unless another is asked for."""
    return lambda figures: megabytes(figures["memory"][0][f"{cache}_bytes"])


def _steps_of(cost: str) -> Callable[[Figures], str]:
    """The most that it costs, in steps that Python takes."""
    return lambda figures: f"{max(row.get(cost, 0) for row in figures['rows']):.0f}"


def _writing_at_once(what: str, *memories: str) -> Callable[[Figures], str]:
    """The most that writing prompts of 16,384 tokens at once adds, of what a store that writes
    everything writes or finds, in any load."""

    def told(figures: Figures) -> str:
        added = [
            of["second sight, 16,384 tokens at once"][what] - of["second sight"][what]
            for load in figures["loads"].values()
            for memory, of in load["memory"].items()
            if memory in memories
        ]
        return f"{100 * max(added):.0f} %"

    return told


NUMBERS: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "model files": ("model_families", lambda figures: str(len(figures["files"]))),
    "model files with pages": ("model_families", _files_that_get("paged", "decode", "gather")),
    "model files that decode from pages": ("model_families", _files_that_get("paged", "decode")),
    "least decode gain": ("whole_model", _least_gain),
    "steps of a recording": ("host_cost", _steps_of("recording_steps")),
    "files with compiled steps": (
        "model_families",
        lambda figures: str(
            sum(
                (each.get("compiled"), each.get("compiled_tokens")) == ("yes", "equal")
                for each in figures["files"].values()
            )
        ),
    ),
    "bits of q4": ("held_bytes", lambda figures: f"{q4_bits(figures)[1]:.2f}"),
    "loss of q8": ("real_model_quality", _loss_of("q8")),
    "loss of q8/q4": ("real_model_quality", _loss_of("q8/q4")),
    "loss of q4": ("real_model_quality", _loss_of("q4")),
    "prompt speed of q8": ("quantised_kernels", _prompt_speed_of("q8")),
    "prompt speed of q4": ("quantised_kernels", _prompt_speed_of("q4")),
    "bytes of mlx-lm's windows": ("rings", _ring_bytes("mlx_lm")),
    "bytes of rings": ("rings", _ring_bytes("paged")),
    "share of monitoring": ("publishing", lambda figures: percent(figures["busy_share"], 1)),
    "time of look-up": ("prefix_reuse", lambda figures: millis(figures["look_up"]["seconds"])),
    "hits at once, small memory": ("store_writes", _writing_at_once("hits", "32768")),
    "hits at once, large memory": ("store_writes", _writing_at_once("hits", "131072", "524288")),
    "bytes at once": ("store_writes", _writing_at_once("bytes", "32768", "131072", "524288")),
    "gain of optimistic admission": (
        "admission",
        lambda figures: f"{figures['short_answers']['1900']['speed_ratio']:.1f}",
    ),
}
"""The bench of each, and what tells it from that bench's figures."""
