"""Makes the tables about pages on disk."""

from typing import Any

from benches.table_cells import count, millis, percent, ratio, table

Figures = dict[str, Any]


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
                f"{millis(run['cold_seconds'])} cold, {ratio(run['cold_over_disk'])} times; "
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
