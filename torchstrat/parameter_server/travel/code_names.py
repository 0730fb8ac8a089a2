"""Which names a function's code uses."""

from __future__ import annotations

import functools
import types


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Global and attribute names used by a function and by the functions defined in it, each once, in order.

    The two kinds are not told apart: ``lib.model`` uses both ``lib`` and ``model``.
    """
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_in(constant)))
    return tuple(names)
