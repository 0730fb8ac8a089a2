"""The role ``worker``: runs scheduled functions over its own copy of what the coordinator's scope captured.

::

    worker.py           what it answers: one function at a time, from dispatch to outcome
    session.py          what the coordinator owns and a function may change for itself
    executor.py         one execution of a function: its name for the servers, its pushes, its outcome
    local_variables.py  this worker's copies of dense variables, and when they are brought up to date
    stand_ins.py        variables that are not current, or on their way: the class that brings them, whoever uses them
    table_parameter.py  what an embedding table is here: no memory; its class brings what PyTorch asks for
    table_rows.py       the rows for lookups, also those that were asked for ahead of them
    gradients.py        the sparse gradients of these, used as one device's dense ones, and what functions leave
    push.py             ``optimizer.step()``: one push to each server, which brings fresh values back
    warm_up.py          what PyTorch imports at an optimizer's first step
"""
