"""Under the name that other tests import: see `tests.support.checkpoints`."""

from tests.support.checkpoints import contents, flip, same, stored

__all__ = ["contents", "flip", "same", "stored"]
