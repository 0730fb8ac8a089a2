"""The role ``worker``: runs scheduled functions over its own copy of what the coordinator's scope captured."""
