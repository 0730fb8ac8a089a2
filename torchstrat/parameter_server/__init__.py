"""Parameter servers: asynchronous training that survives the death of its processes.

Roles, one process each: the *coordinator* runs the user's program and schedules functions; *workers* run them;
*servers* (job ``ps``) hold the variables and the optimizer's state.

From the wire upwards::

    transport.py (the only importer of torch.distributed.rpc), secret.py, control.py, rendezvous.py, liveness.py
    messages.py       what the processes tell each other: frozen dataclasses
    server/           the role ``ps``: shards, optimizers on shards and rows, records of what was applied
    worker/           the role ``worker``: runs functions, over its own copy of the captured objects
    scheduler.py      the coordinator's decisions: a pure state machine
    coordinator.py    the thin shell around it
"""
