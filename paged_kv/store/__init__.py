"""Keeps pages on disk: a folder of page files, shared by processes, under a byte cap.

    keys          keys of files: chained hashes of everything that determines their content
    entry_file    the bytes of a file
    folder        the folder and its system calls
    index         entries and the order of their use; rebuilt from the files when it is lost
    lookup_counts which prefixes prompts begin with again; only these need to be written
    limits        how much it may take and write, and what to evict
    page_store    all of these together, with one writing process at a time
    lookup        finds the stored blocks of a prompt
    background    asynchronous front end to the page store
    maintenance   verify, gc and clear

Nothing here knows MLX's arrays or what a page holds: entries are bytes.
"""
