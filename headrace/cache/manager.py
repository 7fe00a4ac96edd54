"""The KV cache as the scheduler sees it: a `Lease` a request, and hit, grow, trim, commit, release
on it.

Stream order is the lock: a page released while plans that read it are in flight may be leased again
at once, since every later plan runs after them. For the same reason a prompt page can be shared as
soon as its plan is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.cache.pool import PagePool
from headrace.cache.prefix import PrefixIndex
from headrace.cache.spec import NULL_PAGE, KVGroup
from headrace.engine.errors import ConfigError, OutOfMemoryError
from headrace.sched.plan import Ints


@dataclass(slots=True)
class Lease:
    """The pages one request holds.

    pages: for each group, page ids by page index, equally many in all; NULL_PAGE where a page fell
        behind the window.
    trimmed: for each group, how many leading pages were given back (or never taken).
    hashes: the prefix chain, as far as it was computed; it only grows, also over a preemption.
    indexed: leading pages that have been offered to the prefix index.
    """

    root: bytes
    pages: list[list[int]]
    trimmed: list[int]
    hashes: list[bytes] = field(default_factory=list)
    indexed: int = 0


class CacheManager:
    """Pages, prefix index and window rules of all groups. Only the scheduler uses it.

    Args:
        groups: the model's KV groups.
        sectors: sectors in the slab, the null sector included.
        pages_per_sector: from `cut_sectors`.
        prefix_caching: whether released pages stay findable.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        sectors: int,
        pages_per_sector: Sequence[int],
        prefix_caching: bool = True,
    ) -> None:
        if len({group.spec.page_tokens for group in groups}) != 1:
            raise ConfigError(
                "all KV groups of a model must have pages of the same number of tokens"
            )
        self.groups = tuple(groups)
        self.page_tokens = groups[0].spec.page_tokens
        self.windows = tuple(group.spec.window for group in groups)
        self._windowed = any(window is not None for window in self.windows)
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex()
        self.pool = PagePool(sectors, pages_per_sector, self.index.forget)
        self.window_frees = 0

    def lease(self, salt: str = "") -> Lease:
        """An empty lease."""
        count = len(self.groups)
        return Lease(self.index.root(salt), [[] for _ in range(count)], [0] * count)

    def require(self, tokens: int, chunk: int) -> None:
        """Raises OutOfMemoryError unless one sequence of `tokens` tokens, computed in chunks, fits
        alone.
        """
        if not self.pool.can_allocate(self.fresh(0, tokens, chunk)):
            fits = (self.pool.sectors - 1) * self.pool.per_sector[0] * self.page_tokens
            raise OutOfMemoryError(
                f"the KV cache holds about {fits} tokens, not one sequence of {tokens}: "
                "lower max_model_len or give the cache more memory"
            )

    def fresh(self, hit: int, tokens: int, chunk: int) -> list[int]:
        """Pages of each group that a sequence leases at once at most until it has `tokens` tokens.

        Its first `hit` pages were found; the rest is computed in chunks of at most `chunk` tokens.
        """
        pages = -(-tokens // self.page_tokens)
        needs = []
        for window in self.windows:
            need = pages - hit
            if window is not None:
                # What it holds is given back as the window moves on; the rest of the peak is new.
                adopted = hit - self._behind(window, hit * self.page_tokens)
                need = min(need, self._peak(window, pages, chunk) - adopted)
            needs.append(max(0, need))
        return needs

    def _peak(self, window: int, pages: int, chunk: int) -> int:
        """Most pages a sequence of `pages` pages has in a windowed group.

        Two chunks may be in flight beyond the window before the first result lets pages go, and
        both ends may cut a page.
        """
        page = self.page_tokens
        return min(pages, (window - 1 + 2 * (page - 1) + 2 * chunk) // page + 1)

    def hash_known(self, lease: Lease, tokens: Ints) -> None:
        """Extends the chain over all full pages of `tokens`, the request's known tokens from its
        first on.
        """
        if self.prefix_caching:
            done = len(lease.hashes)
            parent = lease.hashes[-1] if lease.hashes else lease.root
            rest = tokens[done * self.page_tokens :]
            lease.hashes += self.index.chain(parent, rest, self.page_tokens)

    def hit(self, hashes: Sequence[bytes]) -> int:
        """Leading pages that every group can serve: the longest boundary on which all agree."""
        boundary = len(hashes)
        while True:
            before = boundary
            for group, window in enumerate(self.windows):
                boundary = self._boundary(group, window, hashes, boundary)
            if boundary == before:
                return boundary

    def adopt(self, lease: Lease, pages: int) -> None:
        """Takes the first `pages` pages of the chain, found by `hit`, into an empty lease."""
        for group, window in enumerate(self.windows):
            first = self._behind(window, pages * self.page_tokens)
            found = [self._found(group, digest) for digest in lease.hashes[first:pages]]
            for page in found:
                self.pool.share(group, page)
            lease.pages[group] = [NULL_PAGE] * first + found
            lease.trimmed[group] = first
        lease.indexed = pages

    def grow(self, lease: Lease, tokens: int) -> list[tuple[int, int, int]] | None:
        """Leases pages up to `tokens` tokens.

        Returns:
            (group, page index, page) for each new page, or None, and nothing is changed, if there
            are not enough.
        """
        start, count = len(lease.pages[0]), -(-tokens // self.page_tokens)
        if not self.pool.can_allocate([max(0, count - start)] * len(self.groups)):
            return None
        try:
            return self._take(lease, start, count)
        except MemoryError:
            # With several groups, cached pages can hold sectors that another group needs whole.
            self.pool.drop_cached()
            return self._take(lease, start, count)

    def _take(self, lease: Lease, start: int, count: int) -> list[tuple[int, int, int]]:
        added: list[tuple[int, int, int]] = []
        try:
            for group, pages in enumerate(lease.pages):
                for index in range(start, count):
                    page = self.pool.allocate(group)
                    added.append((group, index, page))
                    pages.append(page)
        except MemoryError:
            for group, _, page in reversed(added):
                lease.pages[group].pop()
                self.pool.release(group, page, keep=False)
            raise
        return added

    def trim(self, lease: Lease, computed: int) -> None:
        """Gives back pages that no query from position `computed` on can see."""
        if not self._windowed:
            return
        for group, window in enumerate(self.windows):
            behind = self._behind(window, computed)
            for index in range(lease.trimmed[group], behind):
                self._release_page(group, lease.pages[group][index])
                lease.pages[group][index] = NULL_PAGE
                self.window_frees += 1
            lease.trimmed[group] = max(lease.trimmed[group], behind)

    def commit(self, lease: Lease, tokens: Ints, computed: int) -> None:
        """Makes every full page findable.

        `tokens` are the known tokens, the first `computed` are in the cache.
        """
        full = computed // self.page_tokens
        if not self.prefix_caching or full <= lease.indexed:
            return
        if len(lease.hashes) < full:
            self.hash_known(lease, tokens[: full * self.page_tokens])
        for group, pages in enumerate(lease.pages):
            for index in range(lease.indexed, full):
                if pages[index] != NULL_PAGE:
                    self.index.add(group, lease.hashes[index], pages[index])
        lease.indexed = full

    def release(self, lease: Lease) -> None:
        """Gives all pages back; the lease is empty after it, its hashes stay."""
        for group, pages in enumerate(lease.pages):
            # The tail first: the LRU then forgets the end of a prefix before its beginning.
            for page in reversed(pages):
                if page != NULL_PAGE:
                    self._release_page(group, page)
            lease.pages[group] = []
            lease.trimmed[group] = 0
        lease.indexed = 0

    def reset_prefix_cache(self) -> None:
        """Forgets all cached contents; pages in use stay leased but cannot be found any more."""
        self.pool.drop_cached()
        self.index.clear()

    def usage(self) -> float:
        """Leased share of the pages, 0 to 1."""
        total = self.pool.sectors - 1
        return 1 - self.pool.idle_sectors / total

    def check(self, leases: Sequence[Lease]) -> None:
        """Proves that the books and the given leases (all there are) agree. Raises RuntimeError."""
        self.pool.check()
        for group in range(len(self.groups)):
            held: dict[int, int] = {}
            for lease in leases:
                for page in lease.pages[group]:
                    if page != NULL_PAGE:
                        held[page] = held.get(page, 0) + 1
            if held != self.pool.holders(group):
                raise RuntimeError(
                    f"group {group}: leases hold {held}, the pool {self.pool.holders(group)}"
                )

    def _behind(self, window: int | None, computed: int) -> int:
        """Leading pages wholly behind the window of the query at position `computed`."""
        return 0 if window is None else max(0, computed - window + 1) // self.page_tokens

    def _boundary(self, group: int, window: int | None, hashes: Sequence[bytes], limit: int) -> int:
        if window is None:
            for index in range(limit):
                if self.index.find(group, hashes[index]) is None:
                    return index
            return limit
        for boundary in range(limit, 0, -1):
            first = self._behind(window, boundary * self.page_tokens)
            if all(self.index.find(group, digest) is not None for digest in hashes[first:boundary]):
                return boundary
        return 0

    def _found(self, group: int, digest: bytes) -> int:
        page = self.index.find(group, digest)
        if page is None:
            raise RuntimeError(f"group {group}: a page was adopted that is not in the index")
        return page

    def _release_page(self, group: int, page: int) -> None:
        self.pool.release(group, page, keep=self.index.holds(group, page))
