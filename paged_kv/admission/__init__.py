"""Decides which sequences of a batch run.

    pool_size        the memory of a pool, and of a sequence in it
    growth           the memory that must be free before another sequence begins
    scheduler        the running and waiting sequences of a batch, and preemption

Nothing here knows a model or an array.
"""
