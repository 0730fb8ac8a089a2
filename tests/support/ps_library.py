"""Two modules that this process can import and workers cannot, whose functions reach what a test puts there."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.ps_worlds import Job
from torchstrat.errors import FunctionError
from torchstrat.parameter_server.serialization.functions import unpack
from torchstrat.parameter_server.serialization.pack_cache import Packed

LIBRARY = """
import dataclasses
import functools
import psx_other

model = None
table = {}
nested = {"a": [1]}
scale = 1
imports = psx_other

class Holder:
    model = None

holder = Holder()

@dataclasses.dataclass(frozen=True)
class Settings:
    widths: tuple = (1, 2)
    found: list = None

class MoreSettings(Settings):
    pass

settings = Settings(widths=(3, 4))
settings_with_list = Settings(found=[])
more_settings = MoreSettings()

def plain(): return helper()
def helper(): return scale
def names_model(): return model
def far(): return between()
@functools.cache
def between(): return [names_model() for _ in range(1)][0]
def by_table(): return table.get("model")
def by_holder(): return holder.model
def by_class(): return Holder.model
def through_other(): return psx_other.holder.model
def beside(): return sibling(), psx_other.holder.model
def sibling(): return 5
def defaulted(found=None): return found

class Caller:
    def step(self): return helper()

class Stepper:
    alias = property(lambda self: self.found)
    def step(self): return self.found()

    @staticmethod
    def found(): return model
"""

OTHER = """
class Holder:
    model = None

holder = Holder()

def doubled(x): return more(x) + 1
def more(x): return 2 * x if x < 100 else doubled(x - 100)
"""


def library_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """To be made a fixture."""
    (tmp_path / "psx_library.py").write_text(LIBRARY)
    (tmp_path / "psx_other.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("psx_library")
    for name in ("psx_library", "psx_other"):
        sys.modules.pop(name, None)


@contextlib.contextmanager
def without_library() -> Iterator[None]:
    kept = {name: sys.modules.pop(name) for name in ("psx_library", "psx_other")}
    finders, sys.path[:] = sys.path[:], [entry for entry in sys.path if not Path(entry, "psx_library.py").exists()]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = finders
        sys.modules.update(kept)


def is_by_value(packed: Packed) -> bool:
    """Whether the modules are not needed to unpack it."""
    with without_library():
        try:
            unpack(packed, Job().world(make_missing=lambda token: token))
        except FunctionError as error:
            if "cannot import" not in str(error):
                raise
            return False
    return True
