"""Decides which requests begin, and which sequences of a batch run.

    demand           the tokens of a request
    pool_size        the memory of a pool, and of a sequence in it
    policies         whether a request may begin: all reserved, or optimistic
    growth           the memory that must be free before another sequence begins
    admission        the line of a server's requests
    scheduler        the running and waiting sequences of a batch, and preemption

Nothing here knows a model or an array.
"""
