"""Pages and the sectors they are carved from: reference counts, free lists, the LRU of
free-but-cached pages.

The slab is cut into sectors of equal bytes. A KV group takes a sector and carves its pages from it;
the sector comes back when none of its pages is leased or cached. With one group a sector is a page.
Sector 0 is never handed out: page 0 of every group is the null page, a valid target for padding.

A page is in one of three states: free, leased (it has references) or cached (it has none, but its
contents are still indexed by hash). `free + leased + cached == total` always holds; `check()`
proves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class PagePool:
    """Hands out page ids by group. Not thread-safe: only the scheduler uses it.

    Args:
        sectors: number of sectors, the null sector included.
        pages_per_sector: for each group, pages that fit in a sector.
        on_evict: called with (group, page) when a cached page loses its contents.
    """

    def __init__(
        self, sectors: int, pages_per_sector: Sequence[int], on_evict: Callable[[int, int], None]
    ) -> None:
        if sectors < 2:
            raise ValueError(f"a pool needs the null sector and one more, got {sectors}")
        groups = range(len(pages_per_sector))
        self.per_sector = tuple(pages_per_sector)
        self.sectors = sectors
        self._on_evict = on_evict
        self._free_sectors = list(range(sectors - 1, 0, -1))
        self._owner = [-1] * sectors  # the group that carved it
        self._leased = [0] * sectors  # leased pages in it
        self._held = [0] * sectors  # leased or cached pages in it
        self._idle = sectors - 1  # sectors without a leased page
        self._spare = [0 for _ in groups]  # unleased pages in the group's other sectors
        self._free: list[dict[int, None]] = [{} for _ in groups]  # insertion-ordered sets
        self._refs: list[dict[int, int]] = [{} for _ in groups]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in groups]

    def can_allocate(self, needs: Sequence[int]) -> bool:
        """Whether `needs[g]` pages of every group g may be had together, by eviction if need be.

        Exact with one group, and with several once nothing is cached. Else, with several, a False
        is final, and a True can end in a MemoryError when a group takes its page from the last idle
        sector although a cached one of a busy sector would have done.
        """
        sectors = 0
        for group, need in enumerate(needs):
            short = need - self._spare[group]
            if short > 0:
                sectors += -(-short // self.per_sector[group])
        return sectors <= self._idle

    def leased(self, group: int) -> int:
        """Pages of the group that have references."""
        return len(self._refs[group])

    def cached(self, group: int) -> int:
        """Pages of the group that are free but still findable."""
        return len(self._cached[group])

    def available(self, group: int) -> int:
        """Pages the group could lease if no other group took any."""
        return self._spare[group] + self._idle * self.per_sector[group]

    def total(self, group: int) -> int:
        """Pages the group would have if all sectors were its own."""
        return (self.sectors - 1) * self.per_sector[group]

    @property
    def idle_sectors(self) -> int:
        """Sectors without a leased page."""
        return self._idle

    def holders(self, group: int) -> dict[int, int]:
        """References of every leased page."""
        return dict(self._refs[group])

    def allocate(self, group: int) -> int:
        """Leases a page with undefined contents. MemoryError if all are leased."""
        if self.per_sector[group] == 1 and self._free_sectors:
            page = self._free_sectors.pop()  # the sector is the page: nothing to carve
            self._owner[page] = group
        else:
            if not self._free[group]:
                self._refill(group)
            page, _ = self._free[group].popitem()
        self._held[page // self.per_sector[group]] += 1
        self._lease(group, page)
        return page

    def share(self, group: int, page: int) -> None:
        """One more reference to a page that is leased or cached."""
        refs = self._refs[group]
        if page in refs:
            refs[page] += 1
        else:
            del self._cached[group][page]
            self._lease(group, page)

    def release(self, group: int, page: int, keep: bool) -> None:
        """Gives one reference back; the last one frees the page, or caches it if `keep`.

        Raises:
            RuntimeError: nobody holds the page: it was released twice.
        """
        refs = self._refs[group]
        count = refs.get(page, 0)
        if count == 0:
            raise RuntimeError(f"page {page} of group {group} was released twice")
        if count > 1:
            refs[page] = count - 1
            return
        del refs[page]
        self._unlease(group, page)
        if keep:
            self._cached[group][page] = None
        else:
            self._free_page(group, page)

    def drop_cached(self) -> None:
        """Frees every cached page; their contents are forgotten."""
        for group, cached in enumerate(self._cached):
            while cached:
                self._evict(group)

    def check(self) -> None:
        """Proves the books. Raises RuntimeError with what does not add up."""
        for group, per in enumerate(self.per_sector):
            mine = [s for s in range(self.sectors) if self._owner[s] == group]
            pages = {p for s in mine for p in range(s * per, (s + 1) * per)}
            states = [set(self._free[group]), set(self._refs[group]), set(self._cached[group])]
            if sum(map(len, states)) != len(pages) or set().union(*states) != pages:
                counts = "/".join(str(len(s)) for s in states)
                raise RuntimeError(
                    f"group {group}: free/leased/cached {counts} of {len(pages)} pages"
                )
            spare = sum(per - self._leased[s] for s in mine if self._leased[s])
            if spare != self._spare[group]:
                raise RuntimeError(
                    f"group {group}: {spare} spare pages, {self._spare[group]} booked"
                )
        owned = sum(owner >= 0 for owner in self._owner)
        if owned + len(self._free_sectors) != self.sectors - 1:
            raise RuntimeError(
                f"{owned} owned and {len(self._free_sectors)} free of {self.sectors - 1} sectors"
            )
        if self._idle != self.sectors - 1 - sum(n > 0 for n in self._leased):
            raise RuntimeError(f"{self._idle} idle sectors booked")

    def _refill(self, group: int) -> None:
        """Makes a page of the group free: from a free sector, else by eviction."""
        while not self._free[group]:
            if self._free_sectors:
                self._carve(group, self._free_sectors.pop())
                continue
            # Own pages go first: taking another group's helps only once a whole sector of it is
            # empty.
            candidates = [group, *range(len(self._cached))]
            victim = next((g for g in candidates if self._cached[g]), None)
            if victim is None:
                raise MemoryError(f"no page left for group {group}")
            self._evict(victim)

    def _carve(self, group: int, sector: int) -> None:
        per = self.per_sector[group]
        self._owner[sector] = group
        self._free[group].update(dict.fromkeys(range(sector * per, (sector + 1) * per)))

    def _evict(self, group: int) -> None:
        page, _ = self._cached[group].popitem(last=False)
        self._on_evict(group, page)
        self._free_page(group, page)

    def _free_page(self, group: int, page: int) -> None:
        per = self.per_sector[group]
        sector = page // per
        self._free[group][page] = None
        self._held[sector] -= 1
        if self._held[sector] == 0:
            for mine in range(sector * per, (sector + 1) * per):
                del self._free[group][mine]
            self._owner[sector] = -1
            self._free_sectors.append(sector)

    def _lease(self, group: int, page: int) -> None:
        self._refs[group][page] = 1
        sector = page // self.per_sector[group]
        if self._leased[sector] == 0:
            self._idle -= 1
            self._spare[group] += self.per_sector[group]
        self._leased[sector] += 1
        self._spare[group] -= 1

    def _unlease(self, group: int, page: int) -> None:
        sector = page // self.per_sector[group]
        self._leased[sector] -= 1
        self._spare[group] += 1
        if self._leased[sector] == 0:
            self._idle += 1
            self._spare[group] -= self.per_sector[group]
