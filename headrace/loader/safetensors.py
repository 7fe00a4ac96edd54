"""Weights from safetensors files: one, several, or an indexed set. Reads only this rank's share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.engine.errors import LoadError
from headrace.loader.names import Wanted

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsSource:
    """The tensors of a directory's safetensors files.

    Raises:
        LoadError: no such file, a file is missing, truncated or corrupt, or the index is broken.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._catalogue: list[tuple[str, tuple[int, ...]]] = []
        for path in weight_files(directory):
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as e:
                raise _broken(path, e) from e
            for name in file.keys():  # noqa: SIM118 (not a dict)
                view = file.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise LoadError(
                        f"{path}: {name} is of type {view.get_dtype()}, weights must be one of "
                        f"{', '.join(DTYPES)}"
                    )
                self._files[name] = (path, file)
                self._catalogue.append((name, tuple(view.get_shape())))

    def catalogue(self, wanted: Mapping[str, Wanted]) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors; a name twice if two files have it."""
        return self._catalogue

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`[start, stop)` of a tensor along a dimension, in the file's dtype, on the CPU."""
        path, file = self._files[name]
        try:
            view = file.get_slice(name)
            tensor: Tensor = view[start:stop] if dim == 0 else view[:, start:stop]
        except SafetensorError as e:
            raise _broken(path, e) from e
        return tensor


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model in a directory.

    Raises:
        LoadError: none there, or the index is broken or names a file that is not there.
    """
    index = directory / INDEX
    if index.is_file():
        paths = _indexed(index)
    elif (directory / SINGLE).is_file():
        paths = [directory / SINGLE]
    else:
        paths = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if not paths:
        raise LoadError(
            f"no .safetensors file in {directory}: other weight files are not supported"
        )
    return paths


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [index.parent / name for name in sorted(names)]
        # The index is somebody else's text: it may name files beside it and no others.
        gone = [path for path in paths if path.parent != index.parent or not path.is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise LoadError(f"{index} is no index of weights: {type(e).__name__}: {e}") from e
    if gone:
        raise LoadError(f"{index} names {gone[0].name}, which is not there: download it again")
    return paths


def _broken(path: Path, e: Exception) -> LoadError:
    return LoadError(f"{path} is truncated or corrupt ({e}): download it again")
