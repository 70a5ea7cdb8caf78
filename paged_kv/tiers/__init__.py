"""Keeps pages in several places, quickest first: a folder, and servers that machines share.

    tiered_store    all tiers together: reads through them, keeps what it finds in the quicker ones
    remote_tier     a server: one question for a whole prompt, reads ahead, pauses after failures
    remote_writer   writes to a server behind, from a bounded queue
    seal            keyed names and digests: who cannot read the secret cannot make an entry
    blobs           what a server must do: sizes, get, put, list, remove
    redis_blobs     Redis and Valkey, by the package redis (extra "redis")
    s3_blobs        S3 and what speaks its protocol, by the package obstore (extra "s3")
    address         the texts that name tiers: paths, redis://..., s3://...
    store_options   the options of a store
    opening         opens the tiers that addresses name

Entries are bytes here; nothing knows MLX.
"""
