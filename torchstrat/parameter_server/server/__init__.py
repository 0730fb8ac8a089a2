"""The role ``ps``: what a parameter server holds, and what it does when it is told to. No sockets, no rpc.

From the inside out::

    advice.py           what errors say about machines that are too small
    applied.py          which pushes were applied: exactly once, fencing
    shard_optimizer.py  the user's own optimizer class, stepping tensors that are handed to it
    row_optimizer.py    the same on a few rows of a table
    fast_steps.py       plain SGD, and Adagrad on rows, in a few lines
    edits.py            changes that no optimizer makes
    cut.py              what was here at one moment, read while it changes
    held.py             a variable's shards here, its lock, its optimizers' state; the one way to change them
    steps.py            one `OptimizerStep` of a push: checked first, then made
    catalog.py          what is here, as plain data with a digest
    store.py            all of it together, behind locks
    service.py          the store's methods as messages
"""
