"""Pages in a folder and on servers that machines share.

    keys           keys of entries: chained hashes of everything that determines their content
    entry_file     the bytes of an entry: its file, and on a server the seal around it
    lookup         finds the stored blocks that a prompt can begin with; counts look-ups
    options        the options of a store, and the texts that name its places
    blob_store     what a place must do that keeps entries: sizes, get, put, list, remove
    folder_store   a folder as such a place, under a byte cap, shared by processes
    folder         the folder's system calls
    redis_blobs    Redis and Valkey, by the package redis (extra "redis")
    s3_blobs       S3 and what speaks its protocol, by the package obstore (extra "s3")
    tier           a place as prompts see it: one question for a prompt, reads ahead, pauses
    writer         writes to a tier behind, from a bounded queue, and counts what it did
    tiered_store   all tiers: reads through them, keeps what it finds in the quicker ones
    maintenance    verify, gc and clear

Nothing here knows MLX: entries are bytes.
"""
