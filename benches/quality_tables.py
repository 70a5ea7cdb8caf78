"""Makes the tables of all but speed: memory, losses of quantised pages, pages on disk, models."""

from collections.abc import Callable, Iterable
from typing import Any

from benches.table_cells import count, megabytes, millis, percent, quoted, table, three_digits

Figures = dict[str, Any]


def real_model_quality(figures: Figures) -> str:
    """What each cache of a real model loses, by its length."""
    rows = [
        (
            f"{row['model']}, {count(row['tokens'])} tokens: {row['cache']}",
            f"{row['loss_percent']:+.2f} ± {row['standard_error_percent']:.2f} %",
            *(f"{row['by_text'][kind]:+.2f} %" for kind in ("code", "prose", "chat")),
            f"{row['equal_percent']:.1f} %",
            f"{row['kl_mean']:.1e}, {row['kl_99']:.1e}",
        )
        for row in figures["rows"]
        if row["cache"] != "fp16"
    ]
    losses = ("loss of perplexity", "code", "prose", "chat")
    return table(
        ("of each text, in float32", *losses, "same likeliest token", "divergence: mean, 99 %"),
        rows,
    )


def real_recall(figures: Figures) -> str:
    """Right answers of each cache, of as many as there are, and how many of those of 16 bits."""
    caches = list(dict.fromkeys(row["cache"] for row in figures["rows"]))
    asked: dict[tuple[str, str, int], dict[str, Figures]] = {}
    for row in figures["rows"]:
        of_text = asked.setdefault((row["model"], row["task"], row["tokens"]), {})
        of_text[row["cache"]] = row
    rows = [
        (
            f"{model}, {task}, {count(tokens)} tokens",
            *(
                f"{of_text[cache]['right']} of {of_text[cache]['answers']}"
                if cache in of_text
                else ""
                for cache in caches
            ),
        )
        for (model, task, tokens), of_text in asked.items()
    ]
    kept = "; ".join(_answers_kept(cache, asked.values()) for cache in caches[1:])
    return f"{table(('right answers', *caches), rows)}\n\nOf those that fp16 pages give: {kept}."


def _answers_kept(cache: str, texts: Iterable[dict[str, Figures]]) -> str:
    """How many of the right answers of 16 bits a cache gives, in the texts that it has read."""
    read = [each for each in texts if cache in each]
    kept = sum(each[cache]["right_of_exact"] for each in read)
    return f"{cache}: {kept} of {sum(each['fp16']['right'] for each in read)}"


def chosen_quality(figures: Figures) -> str:
    """What is lost by reading a share of the tokens: perplexity, right answers, weight."""
    losses = [
        (
            f"{row['model']}: {row['choice']}, 1/{row['share']} read",
            _loss(row),
        )
        for row in figures["loss"]
    ]
    found = [
        (
            f"{row['model']}: {row['task']}, "
            + (f"1/{row['share']} read" if row["share"] > 1 else "all read"),
            f"{row['right']} of {row['answers']}",
        )
        for row in figures["recall"]
    ]
    mass = [(f"{row['model']}: {row['choice']}", *_mass(row["layers"])) for row in figures["mass"]]
    texts = ", ".join(figures["texts"])
    parts = [
        table(("what is read", "loss of perplexity"), losses),
        f"{figures['measured']} tokens behind {count(figures['before'])}, of texts: {texts}.",
        table(("attention's weight, 1/4 read", "mean of layers", "least of a layer"), mass),
    ]
    if found:
        parts.append(table(("what is asked for", "right answers"), found))
    return "\n\n".join(parts)


def _loss(row: Figures) -> str:
    """Of perplexity, with its error."""
    return f"{row['loss_percent']:+.1f} ± {row['standard_error_percent']:.1f} %"


def _mass(layers: list[float]) -> tuple[str, str]:
    """The mean share of attention's weight that is read, and the least, with its layer."""
    least = min(layers)
    return percent(sum(layers) / len(layers)), f"{percent(least)} (layer {layers.index(least)})"


def offloaded_contexts(figures: Figures) -> str:
    """What is lost where memory does not hold all pages, and how long a step takes."""
    of_exact = {(row["model"], row["kept"]): row["of_exact"] for row in figures["speed"]}
    rows = [
        (
            f"{row['model']}: {row['kept']}",
            _loss(row),
            f"{row['fetched']:.0f}",
            f"{row['late']:.0f}",
            f"{of_exact[row['model'], row['kept']]:.2f}",
        )
        for row in figures["quality"]
        if row["kept"] != "exact"
    ]
    head = ("pages", "loss of perplexity", "fetched a step", "late", "time of an exact step")
    read = f"1/{figures['read_share']} of {count(figures['before'])} tokens read"
    return f"{table(head, rows)}\n\n{read}; pages of a layer, of all layers together."


def real_tokens(figures: Figures) -> str:
    """How many prompts differ in 16 bits from mlx-lm alone, and how near the tokens were."""
    rows = [
        (
            f"{row['model']}, {row['dtype']}: {row['side']}",
            f"{row['prompts_that_differ']} of {row['prompts']}",
            count(row["tokens"]),
            f"{row['largest_gap']:.3f}",
        )
        for row in figures["rows"]
    ]
    return table(("", "prompts that differ", "tokens compared", "largest gap"), rows)


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


def growth(figures: Figures) -> str:
    """What growing to many tokens costs in memory and time, for each way of growing."""
    head = ("held", "peak above held", "copied to grow", "median step", "longest step")
    rows: list[tuple[str, ...]] = []
    for phase, step in figures["tokens_per_step"].items():
        rows += [
            (
                f"{phase}, {step:,} a step: {cache}",
                megabytes(row["held_bytes"]),
                megabytes(row["peak_above_held_bytes"]),
                megabytes(row["copied_for_growth_bytes"]),
                millis(row["median_step_seconds"]),
                millis(row["max_step_seconds"]),
            )
            for cache, row in figures[phase].items()
        ]
    return table((f"{figures['tokens']:,} tokens", *head), rows)


def server_soak(figures: Figures) -> str:
    """What a server held early and at the end of a soak, and what its clients counted."""
    first, last, truth, told = (figures[name] for name in ("first", "last", "truth", "counted"))
    rows = [
        ("resident memory", megabytes(first["resident_bytes"]), megabytes(last["resident_bytes"])),
        ("open files", count(first["files"]), count(last["files"])),
        ("threads", count(first["threads"]), count(last["threads"])),
    ]
    behaviours = ", ".join(f"{name} {n}" for name, n in sorted(truth["behaviours"].items()))
    return (
        table(("idle server", "after 100 requests", f"after {count(figures['requests'])}"), rows)
        + f"\n\nOf {count(sum(truth['kinds'].values()))} answers that were read, "
        f"{len(truth['wrong'])} were wrong. /metrics differed from what the clients counted in "
        f"{len(figures['differences'])} numbers, and {megabytes(told['kv_active_bytes'])} of pages "
        f"were in use at the end. Sequences were preempted "
        f"{count(told['num_preemptions_total'])} times. "
        f"{megabytes(told['store_written_bytes_total'])} were written to the store, which held "
        f"{megabytes(figures['stored_bytes'])} of the {megabytes(figures['store_limit_bytes'])} "
        f"allowed at the end. What the clients did: {behaviours}."
    )


def page_store(figures: Figures) -> str:
    """Time to the first token, rates beside those of the disk, and bytes a token."""
    rows: list[tuple[str, ...]] = []
    tokens = figures["prompt_tokens"]
    for dtype, run in figures["first_token"].items():
        equal = "equal" if run["logits_are_equal"] else "not equal"
        rows.append(
            (
                f"{dtype}: first token of {tokens:,} tokens, from disk",
                millis(run["disk_seconds"]),
                f"{millis(run['cold_seconds'])} cold, {three_digits(run['cold_over_disk'])} times; "
                f"logits {equal}",
            )
        )
    rate = {
        name.removesuffix("_bytes_per_second"): f"{value / 1e9:.2g} GB/s"
        for name, value in figures["throughput"].items()
        if name.endswith("_bytes_per_second")
    }
    warm = rate["store_read_from_page_cache"]
    rows += [
        ("written to the store", rate["store_write"], f"{rate['plain_write']}, plain files"),
        ("read and verified", rate["store_read"], f"{rate['plain_read']}, plain files"),
        ("read and verified, from the page cache", warm, ""),
    ]
    rows += [
        (
            f"{name}: a token of stdlib-llama on disk",
            f"{count(sizes['disk'])} bytes",
            f"{count(sizes['memory'])} in memory",
        )
        for name, sizes in figures["bytes_per_token"].items()
    ]
    runs = [*figures["first_token"].values(), figures["throughput"]]
    left = max(run["share_left_in_page_cache"] for run in runs)
    return (
        table(("page store", "measured", "beside"), rows)
        + "\n\nThe files were taken out of the page cache before they were read from the disk; "
        + f"{percent(left)} of them were still in it."
    )


def page_store_faults(figures: Figures) -> str:
    """Killed writers and damaged files."""
    killed, damaged = figures["killed"], figures["damaged"]
    rows = [
        ("writers killed at a random moment", count(killed["cycles"])),
        ("files read afterwards", count(killed["reads"])),
        ("of them wrong", count(killed["wrong_reads"])),
        ("temporary files left behind, and removed", count(killed.get("left_behind", 0))),
        ("other findings of `verify`", count(killed.get("other_findings", 0))),
        ("most bytes in the folder, at any look", count(killed["most_bytes"])),
        ("its cap", count(killed["cap"])),
        ("damaged files read", count(damaged["files"])),
        ("of them accepted", count(damaged["accepted"])),
    ]
    return table(("page store", "count"), rows)


def store_writes(figures: Figures) -> str:
    """Hits and bytes written of each rule, by load and memory."""
    rows = [
        (name, f"{int(tokens):,}", *(_kept_of(of[rule]) for rule in figures["rules"][1:]))
        for name, load in figures["loads"].items()
        for tokens, of in load["memory"].items()
    ]
    return table(("load", "tokens in memory", *figures["rules"][1:]), rows)


def _kept_of(told: Figures) -> str:
    return f"{percent(told['bytes'])} of bytes, {100 * told['hits']:.1f}% of hits"


def tiers(figures: Figures) -> str:
    """What a server gives, beside a folder and beside computing."""
    read, first, other = (figures[name] for name in ("read", "first_token", "other_server"))
    alone, handed = other["alone"], other["handed"]
    rows = [
        (
            "pages read from Redis on loopback",
            _rate(read["redis_bytes_per_second"]),
            f"{_rate(read['folder_bytes_per_second'])}, a folder in the page cache",
        ),
        (
            f"first token of {first['prompt_tokens']:,} tokens, found on Redis",
            millis(first["found_seconds"]),
            f"{millis(first['computed_seconds'])} computed, "
            f"{first['computed_over_found']:.1f} times",
        ),
        (
            f"first token of {other['prompt_tokens']:,} tokens, computed by another process",
            millis(handed["quiet"]),
            f"{millis(alone['quiet'])} in one process; {other['first_token_over_alone']:.2f} times",
        ),
        (
            "processor's time of the process that writes the text",
            millis(handed["processor"]),
            f"{millis(alone['processor'])} in one process",
        ),
        (
            f"the same beside {other['running']} running texts",
            millis(handed["busy"]),
            f"{millis(alone['busy'])} in one process",
        ),
        (
            "share of their rate that these texts lose meanwhile",
            percent(max(0.0, handed["lost"])),
            f"{percent(alone['lost'])} in one process",
        ),
    ]
    return table(("tier", "measured", "beside"), rows)


def _rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2g} GB/s"


_GETS = {
    "paged": "Attention reads pages",
    "decode": "Attention reads pages while decoding",
    "gather": "Pages, gathered for attention of the model's own",
    "rows": "Rows that layers append are in pages; attention takes those that the model chooses",
    "states": "No pages: prompts resume from snapshots of states",
    "nothing": "Nothing, caches of mlx-lm only",
    "fails": "Fails on pages",
    "not run": "Not run",
}


def model_families(figures: Figures) -> str:
    """The model files, grouped by what they get, and what is not as in most of them."""
    files: dict[str, Figures] = figures["files"]
    lines = []
    for gets, title in _GETS.items():
        names = [_with_reason(name, of) for name, of in files.items() if of["gets"] == gets]
        if names:
            lines.append(f"- **{title}** ({len(names)}): {', '.join(names)}")
    return "\n".join([*lines, "", *_kept(files), *_exceptions(files), *_compiled(files)])


def _with_reason(name: str, entry: Figures) -> str:
    """A file, why it was gathered or not run, or which of mlx-lm's caches it has in place of
    pages."""
    caches = entry["mlx_lm_caches"] if entry["gets"] in ("states", "nothing") else {}
    reason = entry.get("reason") or quoted(caches)
    return f"`{name}` ({reason})" if reason else f"`{name}`"


def _kept(files: dict[str, Figures]) -> list[str]:
    """Which files keep which of mlx-lm's caches beside pages."""
    beside: dict[str, list[str]] = {}
    for name, entry in files.items():
        for cache in entry.get("mlx_lm_caches", {}) if entry.get("paged_layers") else ():
            beside.setdefault(cache, []).append(name)
    return [
        f"- Layers that keep mlx-lm's {cache} beside pages ({len(names)}): {quoted(names)}"
        for cache, names in sorted(beside.items())
    ]


def _compiled(files: dict[str, Figures]) -> list[str]:
    """In how many files decode steps are compiled, and why not in the others."""
    paged = {name: entry for name, entry in files.items() if entry.get("paged_layers")}
    others: dict[str, list[str]] = {}
    for name, entry in paged.items():
        if (told := _why_not_compiled(entry)) is not None:
            others.setdefault(told, []).append(name)
    count = len(paged) - sum(map(len, others.values()))
    return [
        "- Decode steps are compiled, with the same tokens, "
        f"in {count} of {len(paged)} files with pages",
        *(f"  - {reason}: {quoted(names)}" for reason, names in sorted(others.items())),
    ]


_SAID_BY_MLX = {
    "[eval]": "it asks for numbers in the middle of a step",
    "[export_function]": "MLX cannot export one of its operations",
}


def _why_not_compiled(entry: Figures) -> str | None:
    if entry["compiled_tokens"] != "equal":
        return "tokens differ"
    told: str = entry["compiled"]
    for from_mlx, meaning in _SAID_BY_MLX.items():
        if from_mlx in told:
            return meaning
    return None if told == "yes" else told


_BATCHES = {"cannot": "cannot be batched", "differs": "other tokens"}


def _exceptions(files: dict[str, Figures]) -> list[str]:
    """How the tokens compare with mlx-lm's: how many are equal, and which are not."""
    ran = {name: entry for name, entry in files.items() if entry["gets"] != "not run"}
    lines = []
    labels = {
        "alone": "Tokens of prompts alone: equal to mlx-lm's",
        "batch": "Tokens of a ragged batch: equal to mlx-lm's prompts alone",
        "stock_batch": "The same of mlx-lm's own batches",
    }
    for key, label in labels.items():
        others: dict[str, list[str]] = {}
        for name, entry in ran.items():
            if entry[key] != "equal":
                told: str = entry[key]
                others.setdefault(_BATCHES.get(told, told), []).append(name)
        equal = len(ran) - sum(map(len, others.values()))
        lines.append(f"- {label} in {equal} of {len(ran)} files")
        lines += [f"  - {what}: {quoted(names)}" for what, names in sorted(others.items())]
    unsteady = [name for name, entry in ran.items() if not entry["stock_repeats"]]
    if unsteady:
        lines.append(f"- mlx-lm itself gives other tokens when asked again: {quoted(unsteady)}")
    return lines


_VISION_GETS = {
    "paged": "Attention reads pages",
    "gather": "Pages, gathered for attention of the model's own",
    "refused": "Refused: paged_kv does not know a class of the model's caches",
    "not built": "Not run: no small model of it was built",
}


def vision_families(figures: Figures) -> str:
    """The folders of mlx-vlm, grouped by what they get, and whose tokens are not equal."""
    folders: dict[str, Figures] = figures["folders"]
    lines = [f"mlx-vlm {figures['mlx_vlm']}.", ""]
    for gets, title in _VISION_GETS.items():
        names = [name for name, entry in folders.items() if entry["gets"] == gets]
        lines.append(f"- **{title}** ({len(names)}): {quoted(names)}")
    ran = {name: entry for name, entry in folders.items() if "alone" in entry}
    lines.append("")
    for key, label in (("alone", "prompts alone"), ("batch", "a batch")):
        others: dict[str, list[str]] = {}
        for name, entry in ran.items():
            others.setdefault(entry[key], []).append(name)
        equal = others.pop("equal", [])
        lines.append(f"- Tokens of {label}: equal to mlx-vlm's in {len(equal)} of {len(ran)}")
        lines += [f"  - {what}: {quoted(names)}" for what, names in sorted(others.items())]
    return "\n".join(lines)


TABLES: dict[str, Callable[[Figures], str]] = {
    each.__name__: each
    for each in (
        growth,
        server_soak,
        held_bytes,
        real_model_quality,
        real_recall,
        chosen_quality,
        offloaded_contexts,
        real_tokens,
        page_store,
        page_store_faults,
        store_writes,
        tiers,
        model_families,
        vision_families,
    )
}
