"""What lives on the servers, as the coordinator and the workers see it: placement, access, shards, checkpoints.

The coordinator's tensors ask before they are read or written (`coordinator_cache`, `cached_parameter`, `cached_state`);
`remote_access` reads and changes whole variables from any process, `placement` says which server holds what.

Imports from `checkpoint`, `core`, `distributed`, `parameter_server`, `parameter_server/serialization`,
`parameter_server/server` and `replicas`.
"""
