"""Makes attention metadata of batches for tests."""

from paged_kv.kernels.pages.attention_metadata import AttentionMetadata


def unpadded(
    block_tables: tuple[tuple[int, ...], ...], context_lens: tuple[int, ...]
) -> AttentionMetadata:
    """Metadata of sequences whose every step has no padding."""
    return AttentionMetadata(block_tables, context_lens, (0,) * len(context_lens))
