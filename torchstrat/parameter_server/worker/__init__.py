"""The role ``worker``: runs scheduled functions over its own copy of what the coordinator's scope captured.

`worker` and `executor` take functions and send outcomes, `session` puts back what a function has set, `stand_ins` are
variables that have not come yet, and `push` makes an optimizer's step a message to the servers.

Imports from `core`, `parameter_server`, `parameter_server/serialization`, `parameter_server/server`,
`parameter_server/transport`, `parameter_server/variables` and `replicas`.
"""
