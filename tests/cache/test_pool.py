"""Pages, sectors and the LRU: scripted cases, and a model test against plain sets."""

from __future__ import annotations

import random

import pytest

from headrace.cache.pool import PagePool


def make(sectors: int = 5, per: tuple[int, ...] = (1,)) -> tuple[PagePool, list[tuple[int, int]]]:
    evicted: list[tuple[int, int]] = []
    return PagePool(sectors, per, lambda group, page: evicted.append((group, page))), evicted


def test_null_page_is_never_given_out() -> None:
    pool, _ = make(5)
    assert sorted(pool.allocate(0) for _ in range(4)) == [1, 2, 3, 4]
    with pytest.raises(MemoryError):
        pool.allocate(0)


def test_references_are_counted_and_a_second_release_is_refused() -> None:
    pool, _ = make()
    page = pool.allocate(0)
    pool.share(0, page)
    pool.release(0, page, keep=False)
    assert pool.holders(0) == {page: 1}
    pool.release(0, page, keep=False)
    with pytest.raises(RuntimeError, match="released twice"):
        pool.release(0, page, keep=False)
    pool.check()


def test_least_recently_released_page_is_evicted_first() -> None:
    pool, evicted = make(4)
    a, b, c = (pool.allocate(0) for _ in range(3))
    for page in (b, a, c):
        pool.release(0, page, keep=True)
    pool.share(0, b)  # found again: no longer free
    pool.release(0, b, keep=True)
    assert [pool.allocate(0), pool.allocate(0)] == [a, c]
    assert evicted == [(0, a), (0, c)]
    assert pool.cached(0) == 1


def test_sector_returns_when_its_last_page_is_free() -> None:
    pool, evicted = make(3, (4, 2))
    small = [pool.allocate(0) for _ in range(4)]
    assert len({page // 4 for page in small}) == 1, "pages of one group fill a sector first"
    big = [pool.allocate(1) for _ in range(2)]
    assert not pool.can_allocate([1, 0]) and not pool.can_allocate([0, 1])
    for page in small:
        pool.release(0, page, keep=True)
    assert pool.can_allocate([4, 0]) and pool.can_allocate([0, 2]) and not pool.can_allocate([1, 2])
    assert pool.allocate(1) // 2 == small[0] // 4, "the other group's cached pages made room"
    assert len(evicted) == 4
    pool.check()
    for page in big:
        pool.release(1, page, keep=False)
    pool.check()


@pytest.mark.parametrize("per", [(1,), (4,), (4, 1), (3, 2, 1)])
def test_random_use_keeps_the_books(per: tuple[int, ...]) -> None:
    rng = random.Random(sum(per))
    pool, _ = make(9, per)
    held: dict[tuple[int, int], int] = {}
    cached: set[tuple[int, int]] = set()
    pool._on_evict = lambda group, page: cached.remove((group, page))
    for _ in range(4000):
        group = rng.randrange(len(per))
        action = rng.random()
        if action < 0.5:
            room = pool.can_allocate([int(g == group) for g in range(len(per))])
            try:
                page = pool.allocate(group)
            except MemoryError:
                assert not room
            else:
                assert room
                assert (group, page) not in held and (group, page) not in cached
                sector = page // per[group]
                assert all(p // per[g] != sector for g, p in [*held, *cached] if g != group)
                held[group, page] = 1
        elif action < 0.6 and (held or cached):
            group, page = rng.choice(sorted([*held, *cached]))
            pool.share(group, page)
            cached.discard((group, page))
            held[group, page] = held.get((group, page), 0) + 1
        elif held:
            group, page = rng.choice(sorted(held))
            keep = rng.random() < 0.5
            pool.release(group, page, keep)
            held[group, page] -= 1
            if not held[group, page]:
                del held[group, page]
                if keep:
                    cached.add((group, page))
        pool.check()
        for g in range(len(per)):
            assert pool.holders(g) == {p: n for (h, p), n in held.items() if h == g}
            assert pool.cached(g) == sum(h == g for h, _ in cached)


def test_mutant_check_sees_a_lost_page() -> None:
    pool, _ = make()
    page = pool.allocate(0)
    pool.check()
    del pool._refs[0][page]
    with pytest.raises(RuntimeError, match="free/leased/cached"):
        pool.check()
