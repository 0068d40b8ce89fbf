"""The file that `expanse-ebpf trace` and `traces` write: a Perfetto trace."""

from __future__ import annotations

import gzip
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from expanse_ebpf.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from expanse_ebpf.wire.collector_pb2 import Trace

ENDINGS = (".pftrace", ".perfetto-trace", ".pftrace.gz", ".perfetto-trace.gz", ".gz")


class PerfettoFile:
    """The file that a trace goes to; either the whole of it is written, or nothing is touched."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError where no file can be made, so that no window is opened for nothing."""
        self.path = Path(name)
        if not self.path.name.lower().endswith(ENDINGS):
            raise ConfigError(
                f"-o {name}: name it FILE.pftrace, or FILE.pftrace.gz to have it packed; "
                "the summary goes to standard output"
            )
        try:
            self._place = self.path.resolve()  # where a link points
            if self._place.exists() and not self._place.is_file():
                raise ConfigError(f"-o {name}: is no file; name another")
            if self._place.exists() and not os.access(self._place, os.W_OK):
                raise ConfigError(f"-o {name}: permission denied; name another file")
        except RuntimeError:
            raise ConfigError(f"-o {name}: is a loop of links; name another file") from None
        except OSError as error:
            raise ConfigError(f"-o {name}: {error.strerror}; name another file") from None
        folder = self._place.parent
        self._beside = folder / f".expanse-trace-{os.urandom(4).hex()}"
        try:
            self._open().close()
        except OSError as error:
            why = f"the folder {folder} cannot be written: {error.strerror}"
            raise ConfigError(f"-o {name}: {why}; name another") from None
        self._beside.unlink()

    def _open(self) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.fdopen(os.open(self._beside, flags, 0o666), "wb")

    def write(self, traces: list[Trace]) -> None:
        """Write them as one. Raises UnavailableError when that fails, TraceError for damaged ones."""
        from expanse_ebpf.export import perfetto

        try:
            with self._open() as raw, self._packer(raw) as file:
                for chunk in perfetto.chunks(traces):
                    file.write(chunk)
            self._beside.replace(self._place)
        except OSError as error:
            raise UnavailableError(f"cannot write {self.path}: {error.strerror}; give another -o") from None
        finally:
            self._beside.unlink(missing_ok=True)

    def _packer(self, raw: BinaryIO) -> AbstractContextManager[BinaryIO]:
        if not self.path.name.lower().endswith(".gz"):
            return nullcontext(raw)
        return cast("BinaryIO", gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))
