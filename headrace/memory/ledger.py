"""The memory table of a start-up, from the arena's books. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.memory.arena import Snapshot


def memory_table(snapshot: Snapshot, kv_tokens: int) -> str:
    """Renders the books as a table of a few lines, sizes in MiB.

    Args:
        snapshot: the arena's books.
        kv_tokens: tokens the mapped KV cache can hold.
    """
    labels = {
        "weights": "weights",
        "state": "state",
        "kv_cache": f"KV cache ({kv_tokens:,} tokens)",
    }
    rows = [(labels[tag], books.mapped, books.asleep) for tag, books in snapshot.tags.items()]
    rows.append(("total", snapshot.mapped, sum(asleep for _, _, asleep in rows)))
    width = max(len(label) for label, _, _ in rows)
    return "\n".join(_line(label.ljust(width), mapped, asleep) for label, mapped, asleep in rows)


def _line(label: str, mapped: int, asleep: int) -> str:
    sleeping = f"  (+ {_mib(asleep)} MiB asleep)" if asleep else ""
    return f"{label}  {_mib(mapped):>12} MiB{sleeping}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"
