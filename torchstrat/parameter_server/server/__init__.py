"""The role ``ps``: what a parameter server holds, and what it does when it is told to. No sockets, no rpc.

From the inside out::

    deduplication.py      which pushes were applied: exactly once, fencing
    shard_optimizer.py    the user's own optimizer class, stepping tensors that are handed to it, or rows of a table
    live_optimizer.py     an optimizer that steps all that is here together
    snapshot.py           what was here at one moment, read while it changes
    shards.py             a variable's shards here, its lock, its optimizers' state; the one way to change them
    optimizer_step.py     one `OptimizerStep` of a push: checked first, then made
    store.py              all of it together, behind locks
    service.py            the store's methods as messages; what is here, written to a checkpoint and read from one
"""
