"""The memory table, and what is left for the KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from headrace.engine.errors import OutOfMemoryError
from headrace.memory.arena import Arena, CpuFakeBackend
from headrace.memory.ledger import Ledger, memory_table

MIB = 2**20


def test_table_says_what_is_held() -> None:
    arena = Arena(CpuFakeBackend())
    arena.allocate("weights", 3 * MIB)
    arena.allocate("kv_cache", MIB // 2)
    arena.discard("kv_cache")
    lines = memory_table(arena.snapshot(), kv_tokens=12345).splitlines()
    assert [line.split() for line in lines] == [
        ["weights", "3.0", "MiB"],
        ["state", "0.0", "MiB"],
        ["KV", "cache", "(12,345", "tokens)", "0.0", "MiB", "(+", "0.5", "MiB", "asleep)"],
        ["total", "3.0", "MiB", "(+", "0.5", "MiB", "asleep)"],
    ]
    assert len({line.index(" MiB") for line in lines}) == 1


FIGURES = {
    "weights": 15_000 * MIB,
    "state": 100 * MIB,
    "graphs": 900 * MIB,
    "activations": 2_000 * MIB,
    "context": 500 * MIB,
    "margin": 256 * MIB,
}


TABLE = """\
weights                           15,000.0 MiB
state                                100.0 MiB
graphs                               900.0 MiB
activations                        2,000.0 MiB
context                              500.0 MiB
KV cache (655,360 tokens)         80,000.0 MiB
total                             98,500.0 MiB
margin                               256.0 MiB
limit (90% of 140,000.0 MiB)     126,000.0 MiB"""


def test_table_of_a_gpu_has_every_row() -> None:
    ledger = Ledger(
        **FIGURES,
        kv_cache=80_000 * MIB,
        kv_tokens=655_360,
        device=140_000 * MIB,
        limit=126_000 * MIB,
    )
    assert ledger.total == 98_500 * MIB
    assert ledger.render() == TABLE


@pytest.mark.parametrize("name", ["graphs", "activations", "context", "margin", "limit"])
def test_what_is_not_known_is_left_out(name: str) -> None:
    figures = {**FIGURES, "limit": 7 * MIB, name: None}
    lines = Ledger(**figures, kv_cache=MIB, kv_tokens=1).render().splitlines()
    assert len(lines) == 8 and not any(line.startswith(name) for line in lines)


def check_nothing_is_forgotten(room: Callable[[Ledger], int]) -> None:
    limit = 100_000 * MIB
    ledger = Ledger(**FIGURES, limit=limit, kv_cache=7 * MIB, kv_tokens=1)
    assert room(ledger) == limit - sum(FIGURES.values())
    for name in FIGURES:
        grown = dataclasses.replace(ledger, **{name: FIGURES[name] + 7})
        assert room(grown) == room(ledger) - 7
        with pytest.raises(ValueError, match="the KV cache's room needs"):
            room(dataclasses.replace(ledger, **{name: None}))
    with pytest.raises(ValueError, match="and the limit"):
        room(dataclasses.replace(ledger, limit=None))


def test_the_kv_cache_gets_what_is_left() -> None:
    check_nothing_is_forgotten(Ledger.kv_room)


@pytest.mark.parametrize("name", FIGURES)
def test_mutant_a_forgotten_figure_is_found(name: str) -> None:
    def forgetful(ledger: Ledger) -> int:
        return dataclasses.replace(ledger, **{name: 0}).kv_room()

    with pytest.raises(AssertionError):
        check_nothing_is_forgotten(forgetful)


def test_nothing_left_is_said_with_the_figures() -> None:
    limit = sum(FIGURES.values())
    with pytest.raises(OutOfMemoryError, match="nothing is left for the KV cache") as raised:
        Ledger(**FIGURES, limit=limit).kv_room()
    text = str(raised.value)
    assert "weights 15,000.0" in text and "context 500.0" in text and "\n" not in text
    assert Ledger(**FIGURES, limit=limit + 1).kv_room() == 1
