"""What README tells first: a few numbers out of the results of several benches."""

from collections.abc import Callable
from typing import Any

from benches.table_cells import count, megabytes, millis, table

Figures = dict[str, Any]
Digest = Callable[[dict[str, Figures]], str]
Row = tuple[str, str, str, str]


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
    """What speaks for pages, what quantised ones take by length, and what speaks against pages."""
    rows = [
        _server(figures["serving_http"]),
        _first_token(figures["prefix_reuse"]),
        _memory(figures["serving"]),
        *_bits(figures["quantised_bytes"]),
        _best(figures["whole_model"]),
        *_slower(figures["whole_model"]),
        _host(figures["host_cost"]),
    ]
    return table(("measured", "mlx-lm", "paged_kv", "paged_kv / mlx-lm"), rows)


def _server(figures: Figures) -> Row:
    stock, paged = (figures[name]["tokens_per_second"] for name in ("mlx_lm", "paged"))
    load = f"{figures['requests']} requests of {figures['clients']} clients"
    return f"server, {load}: tokens per second", count(stock), count(paged), _ratio(paged / stock)


def _first_token(figures: Figures) -> Row:
    first = figures["time_to_first_token"]
    stock, paged = first["mlx_lm_cold_seconds"], first["paged_cold_seconds"]
    tokens = first["common_tokens"] + first["new_tokens"]
    label = f"first token of a new prompt of {tokens:,} tokens"
    return label, millis(stock), millis(paged), _ratio(paged / stock)


def _memory(figures: Figures) -> Row:
    stock = figures["mlx_lm"]["peak_kv_bytes"]["nbytes"]
    paged = figures["paged"]["peak_kv_bytes"]["mapped"]
    label = f"peak memory of keys and values, {figures['requests']} requests of mixed lengths"
    return label, megabytes(stock), megabytes(paged), _ratio(paged / stock)


def _bits(figures: Figures) -> list[Row]:
    """The page that is written has 16 bits, so a short sequence takes more bits a number."""
    alone = {
        name: [each for each in figures["llama"][name] if each["rows"] == 1]
        for name in ("fp16", "q8", "q4")
    }
    plain = [each["bits"] for each in alone["fp16"]]
    lengths = [f"{each['tokens'] // 1024}K" for each in alone["fp16"]]
    return [
        (
            f"bits a number, {name} pages beside 16 bits, at {' / '.join(lengths)} tokens",
            count(max(plain)),
            " / ".join(f"{each['bits']:.1f}" for each in alone[name]),
            " / ".join(
                _ratio(each["bits"] / least) for each, least in zip(alone[name], plain, strict=True)
            ),
        )
        for name in ("q8", "q4")
    ]


def _best(figures: Figures) -> Row:
    return _decode(max(figures["rows"], key=lambda row: float(row["paged_over_mlx_lm"])))


def _slower(figures: Figures) -> list[Row]:
    """Every whole model that decodes slower on pages."""
    return [_decode(row, "**slower**: ") for row in figures["rows"] if row["paged_over_mlx_lm"] < 1]


def _decode(row: Figures, mark: str = "") -> Row:
    label = f"{mark}decode, {row['model']}, batch {row['batch']}, context {row['context']:,}"
    rates = [row["mlx_lm_tokens_per_second"], row["paged_tokens_per_second"]]
    stock, paged = (f"{rate:,.3g} tokens/s" for rate in rates)
    return label, stock, paged, _ratio(row["paged_over_mlx_lm"])


def _host(figures: Figures) -> Row:
    """Only the rows of GPUs: there a step cannot be faster than the program that builds it."""
    rows = [row for row in figures["rows"] if row["launches_a_layer"]]
    stock, paged = ([row[f"{name}_microseconds"] for row in rows] for name in ("mlx_lm", "paged"))
    ratios = [row["paged_over_mlx_lm"] for row in rows]
    return (
        "**slower**: host time of a GPU decode step, per layer",
        _span(stock),
        _span(paged),
        f"{_ratio(min(ratios))} to {_ratio(max(ratios))}",
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
            "prefix_reuse",
            "serving",
            "quantised_bytes",
            "whole_model",
            "host_cost",
        ),
    ),
}
