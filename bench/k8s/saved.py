"""The collectors' objects on the disk while they are not in the cluster.

A save is a List in YAML, so that `kubectl create -f` takes it too. Its first line, a comment, has in JSON
which cluster and which run it belongs to. Whoever works with a save holds a lock on it, which the kernel lets
go when they die. Once its objects are back it is renamed, and bothers nobody any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.k8s.kubectl import BenchError, Object, named

_MARK = "# expanse-ebpf bench/k8s: "
_SUFFIX, _RESTORED = ".yaml", ".restored"


@dataclass(frozen=True)
class Save:
    """What was saved for one run."""

    path: Path
    run: str  # its name, which the Job and the plan's ConfigMap have as a label
    cluster: str  # the uid of the namespace kube-system, which no two clusters share
    node: str
    namespace: str  # of the Job
    objects: tuple[Object, ...]

    def write(self) -> None:
        """Have it on the disk, whole or not at all; raises BenchError."""
        try:
            self._write()
        except OSError as error:
            raise BenchError(f"{self.path}: {error}; nothing was deleted") from None

    def _write(self) -> None:
        about = {"run": self.run, "cluster": self.cluster, "node": self.node, "namespace": self.namespace}
        whole = {"apiVersion": "v1", "kind": "List", "items": list(self.objects)}
        text = f"{_MARK}{json.dumps(about)}\n{yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)}"
        # Nobody else's to read: a container's environment may have a password in it.
        descriptor, unfinished = tempfile.mkstemp(dir=self.path.parent, prefix=".unfinished-")
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if read(Path(unfinished)).objects != self.objects:
            raise BenchError(f"{unfinished}: what was written reads otherwise; nothing was deleted")
        os.rename(unfinished, self.path)  # noqa: PTH104 (beside its fsync)
        _sync(self.path.parent)

    def done(self) -> Path:
        """Its objects are back: the name that it has from now on."""
        after = self.path.rename(self.path.with_suffix(_RESTORED))
        _sync(after.parent)
        return after


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> Save:
    """The save in a file; raises BenchError."""
    try:
        text = path.read_text(encoding="utf-8")
        first, _, rest = text.partition("\n")
        if not first.startswith(_MARK):
            raise ValueError("its first line is not one of bench/k8s/run.py's")
        about = json.loads(first.removeprefix(_MARK))
        objects = tuple(yaml.safe_load(rest)["items"])
        for thing in objects:
            named(thing)
        return Save(path, objects=objects, **{key: str(value) for key, value in about.items()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise BenchError(f"{path} is no save that can be read: {error}") from None


def folder(wanted: Path | None) -> Path:
    """Where saves are kept, made if it has to be; raises BenchError."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    found = (wanted or Path(state) / "expanse-ebpf/bench-k8s").absolute()
    try:
        found.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BenchError(f"{found}: {error.strerror}; --saves names another folder") from None
    return found


def pending(where: Path, cluster: str) -> Sequence[Path]:
    """The saves whose objects are not back in this cluster; what cannot be read counts too."""
    found = []
    for path in sorted(where.glob(f"*{_SUFFIX}")):
        with contextlib.suppress(BenchError):
            if read(path).cluster != cluster:
                continue
        found.append(path)
    return found


@contextlib.contextmanager
def held(path: Path) -> Generator[None]:
    """Have a save to oneself; raises BenchError when another run works with it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BenchError(f"{path}: a run is still working with it; end that one first, by Ctrl-C") from None
    finally:
        os.close(descriptor)
