"""Parameter servers: asynchronous training that survives the death of its processes.

Roles, one process each: the *coordinator* runs the user's program and schedules functions; *workers* run them;
*servers* (job ``ps``) hold the variables and the optimizer's state. README.md tells how they work together.

From the wire upwards::

    interface.py      how processes talk: the interface; transport/ is it on torch.distributed.rpc, same_host/ in memory
                      of one machine
    membership/       how they find and trust each other, and what hosts a role
    messages.py       what servers are told, and dispatch.py what workers are: frozen dataclasses
    server/           the role ``ps``: shards, optimizers on shards and rows, records of what was applied
    worker/           the role ``worker``: runs functions, over its own copy of the captured objects
    serialization/    how functions and what they reach get there
    variables/        placement, access, shards, checkpoints: the servers' content as the others see it
    scheduler.py      the coordinator's decisions: a pure state machine; dispatcher.py is the thin shell around it
    job.py            the coordinator's hold on the servers; membership/ on the workers
    server_loss.py    what the coordinator does when a server was lost: raise, or restore the newest checkpoint
    coordinator.py    `ClusterCoordinator`

Imports from `checkpoint`, `core`, `data` and `distributed`.
"""
