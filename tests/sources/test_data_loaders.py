"""Which stacks stand inside a data loader."""

from __future__ import annotations

import pytest

from expanse_ebpf.python_stacks.sampler import Frame
from expanse_ebpf.sources import data_loaders
from expanse_ebpf.sources.data_loaders import DataLoaders

SITE = "/opt/venv/lib/python3.11/site-packages"
MAIN = ("main", "/srv/train.py")


def frames(*named: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(name, file, 1, 1) for name, file in named)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("_BaseDataLoaderIter.__next__", f"{SITE}/torch/utils/data/dataloader.py"),
        ("__next__", f"{SITE}/torch/utils/data/dataloader.py"),  # before Python 3.11
        ("_MultiProcessingDataLoaderIter._get_data", "torch/utils/data/dataloader.py"),
        ("DataPipeline.iterator", f"{SITE}/webdataset/pipeline.py"),
        ("IterableDataset.__iter__", f"{SITE}/datasets/iterable_dataset.py"),
        ("OwnedIterator.__next__", f"{SITE}/tensorflow/python/data/ops/iterator_ops.py"),
    ],
)
def test_a_wait_deep_inside_a_loader_is_one_of_it(name: str, file: str) -> None:
    inside = frames(("wait", "/usr/lib/python3.11/threading.py"), (name, file), MAIN)
    assert DataLoaders().hold(inside)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        MAIN,
        ("DataLoader.__init__", f"{SITE}/torch/utils/data/dataloader.py"),
        ("__next__", "/srv/dataloader.py"),
        ("__next__", f"{SITE}/nottorch/utils/data/dataloader.py"),
        ("__next__", ""),
    ],
)
def test_other_functions_and_files_are_none(name: str, file: str) -> None:
    assert not DataLoaders().hold(frames((name, file), MAIN))


def test_the_processes_of_a_loader_are_not_the_programs_wait() -> None:
    worker = ("_worker_loop", f"{SITE}/torch/utils/data/_utils/worker.py")
    loaders = DataLoaders()
    inside = ("IterableDataset.__iter__", f"{SITE}/datasets/iterable_dataset.py")
    for _ in range(2):
        assert not loaders.hold(frames(inside, worker, MAIN))
        assert loaders.hold(frames(inside, MAIN))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_loaders, "_MOST_FILES", 10)
    loaders = DataLoaders()
    inside = frames(("__next__", f"{SITE}/torch/utils/data/dataloader.py"), MAIN)
    for number in range(100):
        assert not loaders.hold(frames(("f", f"/srv/{number}.py")))
        assert loaders.hold(inside)
    assert len(loaders._known) <= 10
