"""Makes the tables of the quality of quantised keys and values."""

from collections.abc import Iterator
from typing import Any

from benches.table_cells import count, megabytes, percent, table

Figures = dict[str, Any]


def quantised_quality(figures: Figures) -> str:
    """Sizes and losses, losses with outliers, and how a long run was requantised."""
    tables = [formats(figures)]
    if figures["outliers"]["rows"]:
        tables.append(outliers(figures["outliers"]))
    return "\n\n".join([*tables, *long_runs(figures["long"])])


def held_bytes(figures: Figures) -> str:
    """Bits held for a number by length, with what that is over pages that are all quantised; and
    beside that a model with windows."""
    llama, gemma3 = figures["by_length"]["llama"], figures["by_length"]["gemma3"]
    rows = [
        (
            f"{count(q4['tokens'])} tokens, {q4['rows']} row" + ("s" if q4["rows"] > 1 else ""),
            *(f"{each['bits']:.2f} ({each['over_codes']:+.0%})" for each in (q8, q4)),
            f"{q4['peak_bits']:.2f}",
            *(f"{each['bits']:.2f}" for each in windows),
        )
        for q8, q4, *windows in zip(llama["q8"], llama["q4"], *gemma3.values(), strict=True)
    ]
    of_windows = [f"with windows: {name}" for name in gemma3]
    return table(
        ("bits held for a number", "q8", "q4", "q4, at most during prefill", *of_windows), rows
    )


def copying(figures: Figures) -> str:
    """How often the likeliest token of a repeated text is right, and is that of 16-bit pages."""
    models: dict[str, Figures] = figures["rows"]
    kinds = list(next(iter(models.values())))
    rows = [
        (
            kind,
            *(
                cell
                for model in models.values()
                for cell in (percent(model[kind]["repeat"]), f"{model[kind]['same']:.1%}")
            ),
        )
        for kind in kinds
    ]
    head = [cell for name in models for cell in (f"{name}: right", "as with 16 bits")]
    return table((f"{count(figures['tokens'])} tokens, read twice", *head), rows)


def step_lengths(figures: Figures) -> str:
    """How far logits differ from those of one step, and how many codes do."""
    models: dict[str, Figures] = figures["rows"]
    first = next(iter(models.values()))
    rows = [
        (
            f"{model}: {length}",
            *(cell for each in formats.values() for cell in _cells(each[length])),
        )
        for model, formats in models.items()
        for length in next(iter(formats.values()))
    ]
    head = [
        f"{name}: {cell}"
        for name, of in first.items()
        for cell in ("logits", "other codes and scales in a million", "logits, numbers given")
        if cell == "logits" or "codes" in next(iter(of.values()))
    ]
    of_tokens = f"{figures['contexts']} texts of {count(figures['tokens'])} tokens, in steps of"
    other = sum(
        each["likeliest"] for of in models.values() for f in of.values() for each in f.values()
    )
    read = figures["contexts"] * figures["tokens"] * len(rows) * len(first)
    return f"{table((of_tokens, *head), rows)}\n\nOther likeliest tokens: {other} of {count(read)}."


def _cells(each: Figures) -> Iterator[str]:
    yield f"{each['logits']:.1e}"
    if "codes" in each:
        yield " and ".join(
            count(1e6 * each[part] / each[f"of_{part}"]) for part in ("codes", "scales")
        )
        yield f"{each['given']:.1e}"


def page_codecs(figures: Figures) -> str:
    """The loss of each codec in each model, context and with outliers."""
    parts = figures["parts"]
    head = ["full pages, loss of perplexity", "bits", *parts]
    codecs = next(iter(parts.values())).items()
    return table(
        head,
        (
            [codec, f"{row['bits']:g}", *(loss(part[codec]) for part in parts.values())]
            for codec, row in codecs
        ),
    )


def formats(figures: Figures) -> str:
    """One row for each kind of cache: bytes, then what each model loses."""
    models = figures["text"]
    head = [f"{figures['tokens']:,} tokens, {figures['backend']} backend", "bytes a token", "bits"]
    for model in models:
        head += [f"{model}: perplexity", "divergence, nats"]
        head += ["equal greedy tokens"] if model in figures["greedy"]["rows"] else []
    names = list(next(iter(models.values()))["rows"])
    return table(head, (_format_row(figures, name) for name in names))


def _format_row(figures: Figures, name: str) -> Iterator[str]:
    yield name
    size = figures["bytes"].get(name)
    yield f"{count(size['token_bytes'])} (1 / {size['times_smaller']:.3g})" if size else ""
    yield f"{size['bits_per_value']:.3g}" if size else ""
    for model, text in figures["text"].items():
        row, greedy = text["rows"][name], figures["greedy"]["rows"].get(model)
        yield f"{row['perplexity']:.3f}" if name == "fp16" else loss(row)
        yield "" if name == "fp16" else f"{row['kl_nats']:.1e}"
        if greedy:
            is_measured = name in greedy
            of = figures["greedy"]["generated"]
            yield f"{greedy[name]['median']:g} of {of}" if is_measured else ""


def loss(row: Figures) -> str:
    return f"{row['loss_percent']:+.2f} ± {row['standard_error_percent']:.2f} %"


def outliers(figures: Figures) -> str:
    head = f"stdlib-llama with channels {figures['times_larger']} times as large"
    rows = [
        (name, loss(row), f"{row['kl_nats']:.1e}")
        for name, row in figures["rows"].items()
        if name != "fp16"
    ]
    return table((head, "perplexity", "divergence, nats"), rows)


def long_runs(figures: Figures) -> Iterator[str]:
    """A table for each run with a budget, beside the perplexities with 16-bit pages."""
    runs = dict(figures["runs"])
    sixteen_bit = runs.pop("fp16", {"timeline": []})
    reference = {row["tokens"]: row["perplexity"] for row in sixteen_bit["timeline"]}
    for name, run in runs.items():
        budget = f"{name}, {megabytes(run['max_bytes'])} for {figures['tokens']:,} tokens"
        head = (budget, "fp16", "q8", "q4", "mapped", "perplexity", "with 16-bit pages")
        rows = [
            (
                f"{row['tokens']:,}",
                *(str(row["blocks_by_format"].get(each, 0)) for each in head[1:4]),
                megabytes(row["bytes_mapped"]),
                f"{row['perplexity']:.2f}",
                f"{reference[row['tokens']]:.2f}" if row["tokens"] in reference else "",
            )
            for row in run["timeline"][1::2]
        ]
        yield f"{table(head, rows)}\n\n{_end(run, sixteen_bit)}"


def _end(run: Figures, sixteen_bit: Figures) -> str:
    """How a run ended."""
    after = f"After {run['end']['tokens']:,} tokens"
    if "exhausted" in run:
        return f"{after}: {run['exhausted']}"
    beside = ""
    if "perplexity" in sixteen_bit:
        beside = f", {sixteen_bit['perplexity']:.2f} with 16-bit pages"
    return f"{after}: perplexity of all {run['perplexity']:.2f}{beside}."
