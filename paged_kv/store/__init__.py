"""Entries of stored pages, and the folder that keeps them under a byte cap.

    keys           keys of entries: chained hashes of everything that determines their content
    entry_file     the bytes of an entry
    lookup         finds the stored blocks that a prompt can begin with
    lookup_counts  which prefixes prompts begin with again; only these need to be written
    blob_store     what a place must do that keeps entries: sizes, get, put, list, remove
    folder_store   a folder as such a place, shared by processes, with one writer at a time
    folder         the folder's system calls
    limits         how much a folder may take and write

Nothing here knows MLX's arrays or what a page holds: entries are bytes.
"""
