"""The prefix index: a chain of keyed hashes, one a full page, and which page holds each.

The hash of page i covers the page's tokens and, through its parent, all before it; the root of the
chain covers what else decides the KV (the client's cache salt). So equal hashes mean equal
prefixes.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from headrace.sched.plan import Ints

DIGEST_BYTES = 16


class PrefixIndex:
    """Finds a page by group and hash. A hash leads to one page; a page has at most one hash."""

    def __init__(self) -> None:
        # A key of this process: nobody outside can construct two prefixes with one hash.
        self._key = secrets.token_bytes(32)
        self._page: dict[tuple[int, bytes], int] = {}
        self._hash: dict[tuple[int, int], bytes] = {}

    def root(self, salt: str = "") -> bytes:
        """The parent of a first page's hash. Requests with different salts never share pages."""
        return blake2b(salt.encode(), key=self._key, digest_size=DIGEST_BYTES).digest()

    def chain(self, parent: bytes, tokens: Ints, page_tokens: int) -> list[bytes]:
        """Hashes of the full pages in `tokens` (int32), which follow on `parent`."""
        hashes = []
        step = page_tokens * 4
        data = memoryview(tokens.tobytes())
        for start in range(0, len(data) - step + 1, step):
            digest = blake2b(parent, key=self._key, digest_size=DIGEST_BYTES)
            digest.update(data[start : start + step])
            parent = digest.digest()
            hashes.append(parent)
        return hashes

    def find(self, group: int, digest: bytes) -> int | None:
        """The page of the group that holds these tokens."""
        return self._page.get((group, digest))

    def add(self, group: int, digest: bytes, page: int) -> None:
        """Makes a page findable.

        If another holds the same tokens already, that one stays and this one is not kept.
        """
        if (group, digest) not in self._page and (group, page) not in self._hash:
            self._page[group, digest] = page
            self._hash[group, page] = digest

    def holds(self, group: int, page: int) -> bool:
        """Whether the page's contents can be found."""
        return (group, page) in self._hash

    def forget(self, group: int, page: int) -> None:
        """The page's contents are gone."""
        del self._page[group, self._hash.pop((group, page))]

    def clear(self) -> None:
        """Forgets all; pages that are still leased become plain ones."""
        self._page.clear()
        self._hash.clear()

    def __len__(self) -> int:
        return len(self._page)
