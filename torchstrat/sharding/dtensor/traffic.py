"""Counts what the logical devices of a replica send each other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes that one process sends, by the kind of exchange, since `clear`.

    Counted is what each kind has to send on the best known way: of a sum of n bytes over P processes 2 n (P - 1) / P,
    of n bytes that all others get (pieces, maxima, and also the edges of bands) n (P - 1). What an implementation sends
    on top (gloo's and NCCL's headers) is not counted.
    """

    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, sent: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent

    def clear(self) -> None:
        self.calls.clear()
        self.sent_bytes.clear()

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def __str__(self) -> str:
        parts = [f"{kind} {self.sent_bytes[kind]:,} bytes in {self.calls[kind]}" for kind in sorted(self.calls)]
        return ", ".join(parts) or "nothing"
