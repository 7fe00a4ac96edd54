"""The KV slab: one region of the arena, cut into sectors, seen page-major by each group."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.cache.spec import KVGroup, Sectors
from headrace.memory.arena import Arena


def map_kv(
    arena: Arena, groups: tuple[KVGroup, ...], sectors: Sectors, count: int
) -> tuple[Tensor, ...]:
    """Maps `count` sectors and returns each group's view `[P, layers, 2, page_tokens, kv_heads,
    head_dim]`.

    All groups see the same memory: which group owns a sector is the cache manager's business.
    """
    slab = arena.allocate("kv_cache", sectors.nbytes * count).tensor
    return tuple(
        _view(slab, group, sectors.nbytes // pages, count * pages)
        for group, pages in zip(groups, sectors.pages, strict=True)
    )


def _view(slab: Tensor, group: KVGroup, stride: int, pages: int) -> Tensor:
    spec = group.spec
    elements = slab.view(getattr(torch, spec.dtype))
    shape = (len(group.layers), 2, spec.page_tokens, spec.heads, spec.head_dim)
    inner = [1]
    for size in reversed(shape[1:]):
        inner.insert(0, inner[0] * size)
    return elements.as_strided((pages, *shape), (stride // elements.itemsize, *inner))
