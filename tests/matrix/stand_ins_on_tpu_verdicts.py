"""Which operations a step on a TPU refuses, and what the error has to say."""

from __future__ import annotations

from collections.abc import Mapping

REFUSED: Mapping[str, str] = {}
NO_ARGUMENTS: frozenset[str] = frozenset()
RIGHT_ELSEWHERE: Mapping[str, str] = {}
