"""Which stacks stand inside a data loader: the program waits there for its next batch, or makes it itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# By the end of a file's path, the functions that give a program its next batch or row.
LOADERS = {
    "torch/utils/data/dataloader.py": frozenset(("__next__", "_next_data", "_get_data")),
    "webdataset/pipeline.py": frozenset(("__iter__", "iterator", "iterator1")),
    "datasets/iterable_dataset.py": frozenset(("__iter__",)),  # Hugging Face's
    "datasets/arrow_dataset.py": frozenset(("__iter__",)),
    "tensorflow/python/data/ops/iterator_ops.py": frozenset(("__next__", "_next_internal")),
}
# A process that makes batches for another one: its work is no wait of the program.
_WORKER = "torch/utils/data/_utils/worker.py"
_NONE: frozenset[str] = frozenset()
_MOST_FILES = 1024  # that are remembered


class _Frame(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...


class DataLoaders:
    """What is known of the files of some interpreters."""

    def __init__(self) -> None:
        self._known: dict[str, frozenset[str] | None] = {}  # None: of a worker

    def hold(self, frames: Sequence[_Frame]) -> bool:
        """Whether a thread with these frames is inside a data loader's function, and no worker of it."""
        found = False
        for frame in frames:
            names = self._known.get(frame.file, _NONE)
            if names is _NONE and frame.file not in self._known:
                names = self._learn(frame.file)
            if names is None:
                return False
            # Qualified from Python 3.11 on.
            found = found or (bool(names) and frame.name.rpartition(".")[2] in names)
        return found

    def _learn(self, file: str) -> frozenset[str] | None:
        if len(self._known) >= _MOST_FILES:
            self._known.clear()
        path = f"/{file}"
        names = next((names for end, names in LOADERS.items() if path.endswith(f"/{end}")), _NONE)
        self._known[file] = None if path.endswith(f"/{_WORKER}") else names
        return self._known[file]
