"""What `paged-kv generate` says about a run."""

from typing import Any

from paged_kv.pool.stats import PoolStats
from paged_kv.sizes import counted, format_size


def summary(prompt: str, figures: Any, stats: PoolStats, *, drafts: bool = False) -> str:
    """Speeds of a `GenerationResponse`, `GenerationResult` or `BatchStats`, and the statistics of
    pages."""
    drafted = counted(stats.draft_tokens, "token")
    accepted = f"drafts      {stats.accepted_tokens:,} of {drafted} accepted\n"
    return (
        f"prompt      {prompt}\n"
        f"generation  {counted(figures.generation_tokens, 'token')}, "
        f"{figures.generation_tps:.1f} tokens/s\n"
        f"pages       {counted(stats.blocks_used, 'block')} in use, "
        f"{stats.blocks_shared} of them shared, "
        f"{stats.blocks_free} free; {format_size(stats.bytes_active)} of "
        f"{format_size(stats.bytes_held)} held, {format_size(stats.bytes_budget)} allowed\n"
        f"{accepted if drafts else ''}"
        f"peak memory {format_size(int(figures.peak_memory * 1e9))}"
    )
