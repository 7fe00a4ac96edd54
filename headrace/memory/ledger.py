"""Where the device's memory goes: one table, and what is left for the KV cache.

Every figure is this process's own and passed in: nothing here asks the device, whose counter of
free memory moves with every other process. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.errors import OutOfMemoryError

if TYPE_CHECKING:
    from headrace.memory.arena import Snapshot


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who takes what of a device, in bytes. What is not known is None and left out of the table.

    weights, state, kv_cache: memory of the arena. kv_tokens: tokens that the KV cache holds.
    graphs: what capturing the CUDA graphs took. activations: the peak of the largest step, beyond
        the graphs. context: what the driver and the libraries hold for this process.
    margin: kept free. device: all memory of the device. limit: what this process may use of it.
    asleep: bytes by tag that waking would take.
    """

    weights: int
    state: int
    kv_cache: int = 0
    kv_tokens: int = 0
    graphs: int | None = None
    activations: int | None = None
    context: int | None = None
    margin: int | None = None
    device: int | None = None
    limit: int | None = None
    asleep: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of all that is known, the margin apart: nobody holds it."""
        known = (self.weights, self.state, self.kv_cache)
        return sum(known) + sum(filter(None, (self.graphs, self.activations, self.context)))

    def render(self) -> str:
        """The table: a line each, sizes in MiB."""
        asleep = self.asleep.get
        rows = [
            ("weights", self.weights, asleep("weights", 0)),
            ("state", self.state, asleep("state", 0)),
            ("graphs", self.graphs, 0),
            ("activations", self.activations, 0),
            ("context", self.context, 0),
            (f"KV cache ({self.kv_tokens:,} tokens)", self.kv_cache, asleep("kv_cache", 0)),
            ("total", self.total, sum(self.asleep.values())),
            ("margin", self.margin, 0),
            (self._limit_label(), self.limit, 0),
        ]
        width = max(len(label) for label, nbytes, _ in rows if nbytes is not None)
        return "\n".join(
            _line(label.ljust(width), nbytes, sleeping)
            for label, nbytes, sleeping in rows
            if nbytes is not None
        )

    def kv_room(self) -> int:
        """Bytes that the KV cache may take in all: the limit less all else.

        That much is allowed, not promised: another process may hold it. Mapping it tells.

        Raises:
            OutOfMemoryError: nothing is left.
            ValueError: a figure that counts is not known.
        """
        names = ("weights", "state", "graphs", "activations", "context", "margin")
        others = {name: getattr(self, name) for name in names}
        if self.limit is None or None in others.values():
            raise ValueError(f"the KV cache's room needs all of {others} and the limit")
        room: int = self.limit - sum(others.values())
        if room <= 0:
            parts = ", ".join(f"{name} {_mib(nbytes)}" for name, nbytes in others.items())
            raise OutOfMemoryError(
                f"of the {_mib(self.limit)} MiB that may be used nothing is left for the KV cache "
                f"({parts} MiB): raise gpu_memory_utilization, lower max_num_batched_tokens or "
                "max_num_seqs, or take a smaller model"
            )
        return room

    def _limit_label(self) -> str:
        if not self.device or self.limit is None:
            return "limit"
        return f"limit ({self.limit / self.device:.0%} of {_mib(self.device)} MiB)"


def memory_table(snapshot: Snapshot, kv_tokens: int) -> str:
    """The table of the arena's books alone.

    Args:
        snapshot: the arena's books.
        kv_tokens: tokens the mapped KV cache can hold.
    """
    tags = snapshot.tags
    return Ledger(
        weights=tags["weights"].mapped,
        state=tags["state"].mapped,
        kv_cache=tags["kv_cache"].mapped,
        kv_tokens=kv_tokens,
        asleep={tag: books.asleep for tag, books in tags.items()},
    ).render()


def _line(label: str, mapped: int, asleep: int) -> str:
    sleeping = f"  (+ {_mib(asleep)} MiB asleep)" if asleep else ""
    return f"{label}  {_mib(mapped):>12} MiB{sleeping}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"
