"""Leases, the prefix chain, windows and hits."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.cache.manager import CacheManager, Lease
from headrace.cache.prefix import PrefixIndex
from headrace.cache.spec import KVSpec, cut_sectors, group_specs
from headrace.engine.errors import ConfigError, OutOfMemoryError

FULL = KVSpec(2, 8, "float32", page_tokens=4)
WINDOW = KVSpec(2, 8, "float32", window=6, page_tokens=4)


def make(*specs: KVSpec, sectors: int = 50, caching: bool = True) -> CacheManager:
    groups = group_specs(specs)
    return CacheManager(groups, sectors, cut_sectors(groups).pages, caching)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def filled(cache: CacheManager, known: np.ndarray, salt: str = "") -> Lease:
    """A lease whose pages were all computed and offered to the index."""
    lease = cache.lease(salt)
    assert cache.grow(lease, len(known)) is not None
    cache.commit(lease, known, len(known))
    cache.trim(lease, len(known))
    return lease


def hit(cache: CacheManager, known: np.ndarray, salt: str = "") -> int:
    lease = cache.lease(salt)
    cache.hash_known(lease, known)
    return cache.hit(lease.hashes)


def test_equal_prefixes_hit_and_others_do_not() -> None:
    cache = make(FULL)
    known = np.arange(18, dtype=np.int32)
    filled(cache, known)
    assert hit(cache, known) == 4
    assert hit(cache, known[:11]) == 2
    changed = known.copy()
    changed[5] = 99
    assert hit(cache, changed) == 1
    assert hit(cache, np.concatenate([known[4:8], known[4:]])) == 0, "position matters"
    assert hit(cache, known, salt="other") == 0


def test_pages_stay_findable_after_release_until_evicted() -> None:
    cache = make(FULL, sectors=6)
    known = np.arange(16, dtype=np.int32)
    cache.release(filled(cache, known))
    assert hit(cache, known) == 4
    other = cache.lease()
    assert cache.grow(other, 12) is not None
    assert hit(cache, known) == 2, "the end of the prefix goes first"
    cache.check([other])


def test_adopt_shares_pages() -> None:
    cache = make(FULL)
    known = np.arange(16, dtype=np.int32)
    first = filled(cache, known)
    second = cache.lease()
    cache.hash_known(second, known)
    cache.adopt(second, 3)
    assert second.pages[0] == first.pages[0][:3]
    cache.check([first, second])
    cache.release(first)
    cache.check([second])
    assert cache.pool.leased(0) == 3


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = make(FULL, caching=False)
    lease = filled(cache, np.arange(16, dtype=np.int32))
    cache.release(lease)
    assert len(cache.index) == 0 and cache.pool.cached(0) == 0


def test_window_needs_only_its_own_pages() -> None:
    cache = make(WINDOW)
    known = np.arange(24, dtype=np.int32)
    lease = filled(cache, known)
    # The query at 24 sees 19 to 23: pages 4 and 5.
    assert [page > 0 for page in lease.pages[0]] == [False] * 4 + [True] * 2
    assert cache.window_frees == 4
    assert hit(cache, known) == 6
    for page in list(cache.pool._cached[0]):
        cache.pool._cached[0].pop(page)
        cache.index.forget(0, page)
        cache.pool._free_page(0, page)
    assert hit(cache, known) == 6, "what lies behind the window is not needed"
    assert hit(cache, known[:12]) == 0
    adopted = cache.lease()
    cache.hash_known(adopted, known)
    cache.adopt(adopted, 6)
    assert adopted.pages == lease.pages and adopted.trimmed == [4]
    cache.check([lease, adopted])


def test_groups_agree_on_the_boundary() -> None:
    cache = make(FULL, WINDOW)
    known = np.arange(24, dtype=np.int32)
    lease = filled(cache, known)
    assert hit(cache, known) == 6
    window = 1
    lost = lease.pages[window][5]
    cache.index.forget(window, lost)
    # At 5 pages the window needs page 3 and 4; they were given back, but are still cached.
    assert hit(cache, known) == 5
    cache.index.forget(window, cache.index.find(window, lease.hashes[3]))
    assert hit(cache, known) == 3


def test_grow_takes_all_or_nothing() -> None:
    cache = make(FULL, sectors=5)
    lease = cache.lease()
    assert cache.grow(lease, 17) is None
    assert lease.pages == [[]]
    cache.check([lease])
    assert [entry[1:] for entry in cache.grow(lease, 9)] == list(enumerate(lease.pages[0]))


def test_fresh_counts_what_a_sequence_takes() -> None:
    cache = make(FULL, WINDOW)
    assert cache.fresh(0, 17, chunk=100) == [5, 5]
    assert cache.fresh(3, 17, chunk=100) == [2, 2]
    # In chunks of one token the window group holds few pages at a time.
    assert cache.fresh(0, 41, chunk=1) == [11, 4]
    # Two pages of the window were found, and go as it moves on.
    assert cache.fresh(9, 41, chunk=1) == [2, 2]


def test_one_sequence_must_fit() -> None:
    cache = make(FULL, sectors=5)
    cache.require(16, 8)
    with pytest.raises(OutOfMemoryError, match="lower max_model_len"):
        cache.require(17, 8)


def test_page_sizes_must_agree() -> None:
    groups = group_specs([FULL, KVSpec(2, 8, "float32", page_tokens=8)])
    with pytest.raises(ConfigError):
        CacheManager(groups, 10, cut_sectors(groups).pages)


def test_index_keeps_the_first_of_two_equal_pages() -> None:
    index = PrefixIndex()
    (digest,) = index.chain(index.root(), tokens(1, 2, 3, 4), 4)
    index.add(0, digest, 7)
    index.add(0, digest, 8)
    assert index.find(0, digest) == 7 and not index.holds(0, 8)
    index.forget(0, 7)
    assert index.find(0, digest) is None


def test_chain_can_be_extended() -> None:
    index = PrefixIndex()
    whole = index.chain(index.root(), np.arange(12, dtype=np.int32), 4)
    head = index.chain(index.root(), np.arange(9, dtype=np.int32), 4)
    assert head == whole[:2]
    assert head + index.chain(head[-1], np.arange(8, 12, dtype=np.int32), 4) == whole
    assert PrefixIndex().root() != PrefixIndex().root(), "the key is the process's own"


def test_sectors_hold_whole_pages_of_every_group() -> None:
    cut = cut_sectors(group_specs([FULL] * 2 + [WINDOW] * 3))
    assert cut.pages == (3, 2) and cut.nbytes == 3 * 2 * FULL.bytes_per_token * 4
    odd = cut_sectors(group_specs([FULL] * 7 + [WINDOW] * 11))
    assert odd.pages == (1, 1), "no common multiple within reach: the smaller page is padded"
    assert odd.nbytes >= 11 * FULL.bytes_per_token * 4


def test_mutant_hash_without_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = PrefixIndex.chain

    def flat(self, parent, known, page_tokens):
        pages = [known[i : i + page_tokens] for i in range(0, len(known), page_tokens)]
        root = self.root()
        return [h for page in pages for h in chain(self, root, page, page_tokens)]

    monkeypatch.setattr(PrefixIndex, "chain", flat)
    with pytest.raises(AssertionError):
        test_equal_prefixes_hit_and_others_do_not()


def test_reset_forgets_everything() -> None:
    cache = make(FULL)
    known = np.arange(16, dtype=np.int32)
    lease = filled(cache, known)
    cache.release(filled(cache, known + 50))
    cache.reset_prefix_cache()
    assert hit(cache, known) == 0 and hit(cache, known + 50) == 0
    cache.release(lease)
    cache.check([])
    assert cache.pool.available(0) == cache.pool.total(0)
