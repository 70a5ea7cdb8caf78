"""Keeps pages in several places, quickest first: a folder, and servers that machines share.

    tiered_store     all tiers: reads through them, keeps what it finds in the quicker ones
    tier             one of them: one question for a prompt, reads ahead, pauses after failures
    writer           writes to a tier behind, from a bounded queue
    prefetch_buffer  entries that were read before the prompt that needs them begins
    waits            how long a prompt waits, and how long a tier is left alone
    seal             keyed names and digests: who cannot read the secret cannot make an entry
    redis_blobs      Redis and Valkey, by the package redis (extra "redis")
    s3_blobs         S3 and what speaks its protocol, by the package obstore (extra "s3")
    address          the texts that name tiers: paths, redis://..., s3://...
    store_options    the options of a store
    opening          opens the tiers that addresses name
    maintenance      verify, gc and clear
    faults           counts what tiers did, and what went wrong

Entries are bytes here; nothing knows MLX.
"""
