"""Caches bounded in bytes, and the registry that empties whatever can be computed again.

A leaf module: any room may import it. It imports no other room and no torch.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar, get_args

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Reason = Literal["sleep", "reload", "lora", "shutdown"]

log = logging.getLogger(__name__)


def nested_nbytes(value: object) -> int:
    """Bytes of the arrays and tensors in `value`, through tuples, lists, sets and dicts.

    A view counts by its own bytes although it keeps its whole base alive: cache copies of views.

    Raises:
        TypeError: something whose size cannot be told; a guess would void the bound.
    """
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, Mapping):
        return sum(nested_nbytes(k) + nested_nbytes(v) for k, v in value.items())
    if isinstance(value, tuple | list | set | frozenset):
        return sum(map(nested_nbytes, value))
    if value is None or isinstance(value, int | float | complex | str | bytes | bytearray):
        return sys.getsizeof(value)
    raise TypeError(f"cannot tell the bytes of a {type(value).__name__}: pass nbytes= to the cache")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was made, and what it holds now. `clear` counts no evictions."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


class _Entries(Generic[K, V]):
    """What a cache holds. `clear` puts a new one in its place: see `_put`."""

    def __init__(self) -> None:
        self.values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.bytes = 0

    def pop(self, key: K) -> object:
        entry = self.values.pop(key, None)
        self.bytes -= entry[1] if entry else 0
        return entry


class BoundedCache(Generic[K, V]):
    """A least-recently-used cache that never holds more than `max_bytes`; for threads.

    Make it an attribute of the instance it serves, in `__init__`: it then dies with it. A key must
    name everything the value depends on, device and dtype included. Values are shared between
    callers: a change in place poisons the cache, so store read-only arrays or never write to them.

    Args:
        name: what messages call it.
        max_bytes: bytes of values held at most; 0 stores nothing.
        max_entries: entries held at most; None leaves the bound to the bytes.
        nbytes: bytes of a value. One of 0 bytes is never stored: it would escape the bound.
    """

    def __init__(
        self,
        name: str,
        max_bytes: int,
        max_entries: int | None = None,
        nbytes: Callable[[V], int] = nested_nbytes,
    ) -> None:
        if max_bytes < 0 or (max_entries is not None and max_entries < 0):
            raise ValueError(f"cache {name}: bounds must be >= 0, got {max_bytes}, {max_entries}")
        self.name = name
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._nbytes = nbytes
        # Reentrant: garbage collection may run a finalizer that clears this cache while we hold it.
        self._lock = threading.RLock()
        self._entries: _Entries[K, V] = _Entries()
        self._hits = self._misses = self._evictions = 0

    def get(self, key: K) -> V | None:
        """The value stored for `key`, now the most recently used; None if there is none."""
        found, _ = self._lookup(key)
        return found[0] if found else None

    def put(self, key: K, value: V) -> None:
        """Stores `value`, in place of an older one; drops others to make room."""
        self._put(self._entries, key, value, replace=True)

    def get_or_compute(self, key: K, fn: Callable[[], V]) -> V:
        """The stored value, or `fn()`, which is stored. The lock is not held while `fn` runs.

        Threads that miss one key together each compute it; all get the value stored first. A value
        whose computation began before a `clear` is returned but not stored: what it was computed
        from may be gone.
        """
        found, entries = self._lookup(key)
        if found:
            return found[0]
        return self._put(entries, key, fn(), replace=False)

    def clear(self, reason: Reason) -> int:
        """Drops all entries. Returns the bytes they counted for."""
        fresh: _Entries[K, V] = _Entries()
        with self._lock:
            dropped, self._entries = self._entries, fresh
        log.debug("cache %s: dropped %d bytes for %s", self.name, dropped.bytes, reason)
        return dropped.bytes

    @property
    def stats(self) -> CacheStats:
        """A consistent copy of the counters."""
        with self._lock:
            entries = self._entries
            return CacheStats(
                self._hits, self._misses, self._evictions, len(entries.values), entries.bytes
            )

    def _lookup(self, key: K) -> tuple[tuple[V, int] | None, _Entries[K, V]]:
        with self._lock:
            entries = self._entries
            found = entries.values.get(key)
            if found is None:
                self._misses += 1
            else:
                self._hits += 1
                entries.values.move_to_end(key)
            return found, entries

    def _put(self, entries: _Entries[K, V], key: K, value: V, *, replace: bool) -> V:
        """Stores into `entries`, if no `clear` has replaced them. Returns the value to use."""
        cost = self._nbytes(value)
        # Values are dropped after the lock: their finalizers are not ours.
        dropped: list[object] = []
        with self._lock:
            if entries is not self._entries:
                return value
            stored = entries.values.get(key)
            if stored is not None and not replace:
                return stored[0]
            dropped.append(entries.pop(key))
            if 0 < cost <= self.max_bytes and self.max_entries != 0:
                self._evict(entries, cost, dropped)
                entries.values[key] = (value, cost)
                entries.bytes += cost
        return value

    def _evict(self, entries: _Entries[K, V], cost: int, dropped: list[object]) -> None:
        """Makes room for one more entry of `cost` bytes."""
        most = sys.maxsize if self.max_entries is None else self.max_entries
        while entries.bytes + cost > self.max_bytes or len(entries.values) >= most:
            dropped.append(entries.pop(next(iter(entries.values))))
            self._evictions += 1


@dataclass(frozen=True, slots=True)
class _Registration:
    name: str
    owner: weakref.ref[object]
    clear: weakref.WeakMethod[Callable[[Reason], int]]

    @property
    def live(self) -> bool:
        return self.owner() is not None and self.clear() is not None


class EphemeralState:
    """All state of this process that can be dropped and computed again: caches, tables, workspaces.

    It lies outside the arena, so sleep, reload, LoRA wrapping and shutdown clear it here. Nothing
    is kept alive by being registered. One process may run several engines: each passes its own
    objects as `owners`.
    """

    _lock: ClassVar[threading.RLock] = threading.RLock()
    _registrations: ClassVar[list[_Registration]] = []

    @classmethod
    def register(cls, owner: object, clear_fn: Callable[[Reason], int], name: str) -> None:
        """Has `clear_fn` called until `owner`, or the object whose method it is, dies.

        Args:
            owner: the object that the state belongs to, such as a layer.
            clear_fn: a bound method, such as a BoundedCache's `clear`. Takes the reason, returns
                the bytes it freed.
            name: what reports call the state. Equal names are added up.

        Raises:
            TypeError: `clear_fn` is no bound method. A closure would have to be held here, and may
                hold the owner.
        """
        if not hasattr(clear_fn, "__func__"):
            raise TypeError(f"clear_fn of {name} must be a bound method, got {clear_fn!r}")
        new = _Registration(name, weakref.ref(owner), weakref.WeakMethod(clear_fn))
        with cls._lock:
            cls._registrations = [*filter(lambda r: r.live, cls._registrations), new]

    @classmethod
    def clear(cls, reason: Reason, owners: Iterable[object] | None = None) -> dict[str, int]:
        """Clears what is registered.

        Args:
            reason: passed on to the clear functions.
            owners: clear only what these objects own (for a model, its `modules()`); None: all.

        Returns:
            Bytes freed by name.

        Raises:
            ValueError: an unknown reason.
            ExceptionGroup: clear functions that failed; all others were called.
        """
        if reason not in get_args(Reason):
            raise ValueError(f"reason must be one of {get_args(Reason)}, got {reason!r}")
        # By identity: an owner's own __eq__ may mean anything.
        wanted = None if owners is None else {id(owner): owner for owner in owners}
        freed: dict[str, int] = {}
        errors: list[Exception] = []
        for registration in cls._registrations:
            owner, clear_fn = registration.owner(), registration.clear()
            if owner is None or clear_fn is None:
                continue
            if wanted is not None and id(owner) not in wanted:
                continue
            try:
                freed[registration.name] = freed.get(registration.name, 0) + clear_fn(reason)
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup(f"clearing ephemeral state for {reason}", errors)
        return freed
