"""Pages on disk: a folder of page files, shared by processes, under a byte cap.

    keys          what a file is found by
    entry_file    the bytes of a file
    folder        the folder and its system calls
    packed_tokens token ids as the index knows them
    index         what is stored and when it was used; rebuilt from the files when it is lost
    eviction      what goes when there is no room
    page_store    all of these together, one process at a time
    lookup        what of a prompt is stored
    background    a store whose disk nobody waits for
    maintenance   verify, gc and clear; export and import

Nothing here knows arrays of MLX, or what a page holds: entries are bytes.
"""
