"""`tests.support.input_ranks`, by the name that it had."""

from __future__ import annotations

from tests.support.input_ranks import layout_in_process as layout_in_process
