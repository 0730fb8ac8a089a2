"""How functions travel, and the captured objects that they reach: by value, by reference, or not at all.

`functions` packs and unpacks, by `pickler`, and has a worker's copies of what workers know by a token;
`captured_objects` is the coordinator's list of that. What cannot travel is named by the path on which it was reached
(`path_errors`).

Imports from `core`, `parameter_server` and `sharding`.
"""
