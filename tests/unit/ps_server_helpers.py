"""Another name of `tests.support.server_stores`, for tests that have not moved to it."""

from tests.support.server_stores import add_edit, add_optimizer, dense_step, make_spec, make_store, new_shards, push_of

__all__ = ["add_edit", "add_optimizer", "dense_step", "make_spec", "make_store", "new_shards", "push_of"]
