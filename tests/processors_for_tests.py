"""A custom logits processor that does what a request's `extra_args` say, good or bad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace import BadRequestError
from headrace.sampling.processors import LogitsProcessor, ProcessorView


class Obedient(LogitsProcessor):
    """`add`: [id, value] is added to a logit; `echo`: value added to the logit of the last token;
    `fill`: all logits become this ("nan", "-inf"); `fail`: "front", "rank" or "call", raises there;
    `stray`: writes to "all" the rows it gets, or tries to write behind them.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self.prepared: list[Mapping[str, Any]] = []

    def prepare(self, extra_args: Mapping[str, Any]) -> Any:
        known = extra_args in self.prepared
        self.prepared.append(extra_args)
        where = extra_args.get("fail")
        if where == "front":
            raise BadRequestError("no such thing", "extra_args")
        if where == "rank" and known:
            raise ArithmeticError("refused in the rank")
        orders = {"add", "echo", "fill", "fail", "stray"}
        return extra_args if orders & extra_args.keys() else None

    def __call__(self, logits_AV: Tensor, view: ProcessorView) -> None:
        at_A = torch.arange(len(view.states), device=self.device)
        last_A = view.tokens()[at_A, view.position_A - 1].long()
        for index, state in enumerate(view.states):
            if state.get("fail") == "call":
                raise ArithmeticError("failed in the call")
            if "add" in state:
                token, value = state["add"]
                logits_AV[index, token] += value
            if "echo" in state:
                logits_AV[index].index_add_(
                    0, last_A[index : index + 1], torch.full_like(logits_AV[0, :1], state["echo"])
                )
            if "fill" in state:
                logits_AV[index] = float(state["fill"])
            if state.get("stray") == "all":
                logits_AV.fill_(7.0)
            elif state.get("stray") == "resize":
                logits_AV.resize_(len(logits_AV) + 3, self.vocab_size)
                logits_AV.fill_(7.0)
            elif "stray" in state:
                size = (len(logits_AV) + 3, self.vocab_size)
                logits_AV.as_strided(size, (self.vocab_size, 1)).fill_(7.0)


class Unmakeable(LogitsProcessor):
    """Cannot be made."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        raise OSError("no licence")

    def prepare(self, extra_args: Mapping[str, Any]) -> Any:
        return None

    def __call__(self, logits_AV: Tensor, view: ProcessorView) -> None:
        return None
