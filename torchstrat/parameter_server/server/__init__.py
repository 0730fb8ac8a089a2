"""The role ``ps``: what a parameter server holds, and what it does when it is told to. No sockets, no rpc.

`service` is what messages call, `store` holds the shards, `shard_optimizer` and `live_optimizer` step them, and
`deduplication` knows what was applied.

Imports from `checkpoint`, `core`, `parameter_server`, `parameter_server/serialization` and
`parameter_server/variables`.
"""
