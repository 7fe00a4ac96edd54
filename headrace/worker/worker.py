"""Builds one rank: model, weights, state by row, KV cache, runner; and takes it all down again."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.attn.base import Capacity
from headrace.attn.cpu import CpuAttention
from headrace.cache.bounded import EphemeralState
from headrace.cache.spec import NULL_PAGE, KVGroup, Sectors, cut_sectors, group_specs
from headrace.config import EngineConfig
from headrace.engine.errors import ConfigError, OutOfMemoryError
from headrace.layers.attention import attention_layers, bind_groups
from headrace.loader.generation import eos_ids
from headrace.loader.hub import ModelFiles
from headrace.loader.loader import load, open_source
from headrace.memory.arena import Arena, TorchBackend
from headrace.memory.ledger import memory_table
from headrace.models.base import Decoder, config_dtype
from headrace.models.registry import build
from headrace.sampling.indices import Limits
from headrace.sampling.processors import LogitsProcessor, load_processors
from headrace.worker.draws import Draws
from headrace.worker.inputs import GroupInputs
from headrace.worker.kv import map_kv
from headrace.worker.rows import Rows
from headrace.worker.runner import ModelRunner

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30
"""The KV cache's default size on a CPU, memory and need permitting."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the rest of the engine must know of the model and its memory.

    groups, cut, sectors: the KV groups, how the slab is cut, and into how many sectors, the null
        one included.
    limits: bounds of what requests index. eos_ids: from the model's config. processors: custom
        ones, by which a front end in this process checks their arguments.
    """

    groups: tuple[KVGroup, ...]
    cut: Sectors
    sectors: int
    max_model_len: int
    limits: Limits
    eos_ids: tuple[int, ...]
    processors: tuple[LogitsProcessor, ...]
    dtype: str
    memory: str

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV cache holds, if one sequence took it all."""
        return tokens_of(self.groups, self.cut, self.sectors)


def tokens_of(groups: tuple[KVGroup, ...], cut: Sectors, sectors: int) -> int:
    """Tokens that fit in `sectors` sectors without the null one; windows are not made use of."""
    page_tokens = groups[0].spec.page_tokens
    per_page = sum(
        1 / pages for pages in cut.pages
    )  # sectors that one page index takes over all groups
    return int((sectors - 1) / per_page) * page_tokens


class Worker:
    """One rank and everything it holds.

    Args:
        config: the settings.
        files: the model's.
        decodable: token ids from this one on are never generated; None: all may be.

    Raises:
        HeadraceError: no such device, files that cannot be loaded, or not enough memory.
    """

    def __init__(
        self, config: EngineConfig, files: ModelFiles, decodable: int | None = None
    ) -> None:
        self.device = torch.device("cpu")
        hf_config, source = open_source(files, config.load_format, config.seed)
        eos = eos_ids(hf_config, files.path)
        self.dtype = _dtype(config, hf_config, files)
        self.arena = Arena(TorchBackend(self.device))
        try:
            self.model = build(hf_config, self.dtype)
            _check_memory(self.model, self.dtype)
            load(self.model, source, self.arena, self.device, self.dtype)
            self.info = self._init_cache(config, eos, decodable)
        except BaseException:
            self.arena.close()
            raise

    def shutdown(self) -> dict[str, int]:
        """Drops all state; returns bytes released by tag. `self.model_ref` then tells whether the
        model is gone.
        """
        books = self.arena.snapshot().tags
        released = {tag: entry.mapped for tag, entry in books.items()}
        EphemeralState.clear("shutdown", owners=[*self.model.modules()])
        self.model_ref = weakref.ref(self.model)
        del self.runner, self.model
        self.arena.close()
        gc.collect()
        return released

    def _init_cache(
        self, config: EngineConfig, eos: tuple[int, ...], decodable: int | None
    ) -> EngineInfo:
        """Maps the KV cache and the state by row: last, when the weights' size is known."""
        model = self.model
        groups = group_specs(model.kv_specs())
        bind_groups(model, groups)
        cut = cut_sectors(groups)
        sectors = self._count_sectors(config, groups, cut)
        max_len = _max_len(config, model, tokens_of(groups, cut, sectors))
        pages = [group.pages(max_len) for group in groups]
        rows = Rows(self.arena, config.max_num_seqs, max_len, pages)
        slabs = map_kv(self.arena, groups, cut, sectors)
        inputs = [
            self._group_inputs(config, group, slab, table)
            for group, slab, table in zip(groups, slabs, rows.tables, strict=True)
        ]
        vocab = model.spec.vocab
        processors = load_processors(config.logits_processors, vocab, self.device)
        draws = Draws(rows, self.arena, vocab, model.logits, processors, decodable)
        self.runner = ModelRunner(model, rows, draws, inputs, self.device)
        return EngineInfo(
            groups=groups,
            cut=cut,
            sectors=sectors,
            max_model_len=max_len,
            limits=Limits(vocab, vocab, None, config.max_logprobs),
            eos_ids=eos,
            processors=processors,
            dtype=str(self.dtype).removeprefix("torch."),
            memory=memory_table(self.arena.snapshot(), tokens_of(groups, cut, sectors)),
        )

    def _group_inputs(
        self, config: EngineConfig, group: KVGroup, slab: Tensor, table: Tensor
    ) -> GroupInputs:
        # Padding may read the null page, and memory that was never written may hold NaN.
        slab[NULL_PAGE].zero_()
        heads = attention_layers(self.model)[group.layers[0]].heads
        backend = CpuAttention(group, heads)
        capacity = Capacity(config.max_num_seqs, config.max_num_batched_tokens, table.shape[1])
        meta = backend.buffers(capacity)
        no_slots = torch.empty(0, dtype=torch.int64)
        return GroupInputs(kv=slab, table=table, slots_N=no_slots, backend=backend, meta=meta)

    def _count_sectors(
        self, config: EngineConfig, groups: tuple[KVGroup, ...], cut: Sectors
    ) -> int:
        """How many sectors the settings and the machine give, the null one included."""
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override + 1
        budget = config.kv_cache_memory_bytes
        if budget is None:
            free = available_memory()
            budget = min(CPU_CACHE_BYTES, int(free * config.gpu_memory_utilization))
            # More than all rows can fill is of use only to the prefix cache.
            longest = config.max_model_len or self.model.spec.rope.max_positions
            page = max(group.pages(longest) for group in groups) * sum(g.page_bytes for g in groups)
            budget = min(budget, config.max_num_seqs * page + cut.nbytes)
        if budget < 2 * cut.nbytes:
            raise OutOfMemoryError(
                f"the KV cache has {budget >> 20} MiB, too little for one page of {cut.nbytes} B: "
                "free memory or raise kv_cache_memory_bytes"
            )
        return budget // cut.nbytes


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        # Not Linux: half of what is built in is a cautious guess.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _check_memory(model: Decoder, dtype: torch.dtype) -> None:
    """Refuses weights that cannot fit: the system would grant memory and end the process later."""
    needed = sum(param.numel() for param in model.parameters()) * dtype.itemsize
    free = available_memory()
    if needed > free:
        raise OutOfMemoryError(
            f"the weights take {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')} and "
            f"{free / 2**30:.1f} GiB of memory are free: free memory or take a smaller model"
        )


def _dtype(config: EngineConfig, hf_config: dict[str, Any], files: ModelFiles) -> torch.dtype:
    """The dtype to compute in; `auto` takes the checkpoint's, and bfloat16 for packed ones."""
    name: str = config.dtype
    if name == "auto":
        name = "bfloat16" if files.kind == "gguf" else config_dtype(hf_config)
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype {name} is not known")
    return dtype


def _max_len(config: EngineConfig, model: Decoder, fits: int) -> int:
    """The longest sequence: as asked, or as much of the model's own limit as the KV cache holds."""
    limit = model.spec.rope.max_positions
    if config.max_model_len is None:
        if fits < limit:
            log.warning(
                "max_model_len is %d, not the model's %d: the KV cache holds no more", fits, limit
            )
        return min(limit, fits)
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's limit of {limit} positions"
        )
    return config.max_model_len
