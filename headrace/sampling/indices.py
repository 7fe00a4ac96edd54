"""Checks of a client's integers that become indices. A leaf module: no torch.

The question is never which vocabulary an id belongs to, but which tensor it indexes and how wide
that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.errors import BadRequestError
from headrace.sampling.params import is_int

SHOWN = 10
"""Bad ids that an error message lists at most."""


def check_ids(name: str, ids: Any, width: int, most: int | None = None) -> None:
    """Checks that `ids` is a sequence of integers in [0, width), at most `most` of them.

    Raises:
        BadRequestError: `param` is `name`; at most ten bad ids are listed.
    """
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Sequence):
        raise BadRequestError(f"{name} must be a list of integers, got {type(ids).__name__}", name)
    if most is not None and len(ids) > most:
        raise BadRequestError(f"{name} has {len(ids)} entries, at most {most} are possible", name)
    wrong = [i for i in ids if not is_int(i)]
    if wrong:
        raise BadRequestError(f"{name} must hold integers, got {wrong[:SHOWN]}", name)
    bad = [i for i in ids if not 0 <= i < width]
    if bad:
        raise BadRequestError(
            f"token_id(s) {bad[:SHOWN]} in {name} are outside the model vocabulary (size {width})",
            name,
        )
