"""Records the events of blocks, and replays them with another budget or page size.

    recorder          writes a trace, and describes its format
    replay            runs a trace against the same allocator and prefix index
    requests          finds the requests that were served
    admission_replay  runs them with an admission policy
    reuse_replay      finds how much of their prompts an eviction policy keeps
    state_replay      finds the same of recurrent states
    simulated_pool    a pool without pages
    synthetic_load    writes a trace of a made-up load
    request_lines     writes a trace of requests only
    agent_load        makes up those of agents
    public_traces     reads those that others have published

The pool imports `recorder`, which knows only blocks. The others know pools.
"""
