"""How processes find and trust each other: secret, control sockets, rendezvous, and the process that hosts a role.

`handshake` and `control_channel` are the wire, `membership` the coordinator's view, `task_server` and `task_host` the
process that waits for coordinators. What is said afterwards goes through `transport`.

Imports from `core`, `distributed`, `parameter_server` and `parameter_server/transport`.
"""
