"""Replays recorded loads with another budget or page size.

    replay          runs a trace against the same allocator and prefix index
    requests        finds the requests that were served
    admission_replay  runs them with an admission policy
    simulated_pool  a pool without pages
    synthetic_load  writes a trace of a made-up load

`pool/trace` records traces, and describes their format.
"""
