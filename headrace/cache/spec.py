"""What a layer keeps per token (`KVSpec`) and how layers with equal needs share pages (`KVGroup`).

No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
GQA_PAGE_TOKENS = 16
PAGE_ALIGN = 256
NULL_PAGE = 0
"""Never handed out: where padding reads and writes."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One attention layer's cache: keys and values of `heads` heads for every token.

    Args:
        heads: KV heads held by this rank.
        head_dim: elements a head.
        dtype: name of the element type, as torch spells it.
        window: tokens a query may look back on, itself included; None for all.
        page_tokens: tokens a page.
    """

    heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    page_tokens: int = GQA_PAGE_TOKENS

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer (key and value)."""
        return 2 * self.heads * self.head_dim * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """All layers with one spec.

    They share page ids: page p of the group holds the same tokens in each of its layers.
    """

    spec: KVSpec
    layers: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group (page-major: one contiguous range)."""
        return self.spec.bytes_per_token * self.spec.page_tokens * len(self.layers)

    def pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.spec.page_tokens)


def group_specs(specs: Sequence[KVSpec]) -> tuple[KVGroup, ...]:
    """Gathers layers of equal spec; groups stand in the order of their first layer."""
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    return tuple(KVGroup(spec, tuple(members)) for spec, members in layers.items())


@dataclass(frozen=True, slots=True)
class Sectors:
    """How a slab is cut. Page p of group g begins at byte p * (nbytes // pages[g]).

    nbytes: bytes a sector. pages: for each group, pages a sector.
    """

    nbytes: int
    pages: tuple[int, ...]


def cut_sectors(groups: Sequence[KVGroup]) -> Sectors:
    """Finds a sector that holds whole pages of every group: the least common multiple of their
    sizes.

    Where that is more than four times the largest page, the sector is about that page, and smaller
    ones are padded.
    """
    sizes = [group.page_bytes for group in groups]
    sector = lcm(*sizes)
    if sector <= 4 * max(sizes):
        return Sectors(sector, tuple(sector // size for size in sizes))
    pages = tuple(max(sizes) // size for size in sizes)
    align = lcm(*pages) * PAGE_ALIGN
    return Sectors(-(-max(sizes) // align) * align, pages)
