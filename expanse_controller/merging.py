"""Merging stored profiles, in a process of its own.

A merge is many seconds of pure Python when the span is long. In a thread it would keep the interpreter
from taking in reports, and its memory would stay with the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import sqlite3
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from expanse_controller import schema
from expanse_controller.errors import ControllerError
from expanse_ebpf.export import pprof
from expanse_ebpf.wire.profile_pb2 import Profile

# What one question may take: a day of eight nodes, or a week of one.
MAX_PARTS = 12_000
MAX_BYTES = 512 << 20
MERGE_S = 180.0
MAX_MEMORY_BYTES = 512 << 20
MAX_MERGED_BYTES = 32 << 20
REMEDY = "ask for a shorter span or for one node"

_COUNT = struct.Struct(">I")
_ROW = struct.Struct(">qq")


async def merged(db: Path, rows: Sequence[tuple[int, int]]) -> tuple[bytes, int]:
    """The sum of the profiles in these (row, job) of the store at `db`, packed, and how many are in it.

    Those that have expired by now, and damaged ones, are not. Raises ControllerError, and ends the
    process that does the work when it is cancelled.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", __name__, str(db)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ControllerError(f"merging cannot begin: {error.strerror}; ask again later") from None
    try:
        # It ends by itself before; a damaged profile may hold it up.
        async with asyncio.timeout(MERGE_S + 10.0):
            output, said = await process.communicate(b"".join(itertools.starmap(_ROW.pack, rows)))
    except TimeoutError:
        raise ControllerError(f"merging took longer than {MERGE_S:.0f} s; {REMEDY}") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode or len(output) < _COUNT.size:
        words = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise ControllerError(words.removeprefix("error: ") or f"merging ended with {process.returncode}")
    (count,) = _COUNT.unpack_from(output)
    return output[_COUNT.size :] if count else b"", count


class _Parts:
    """The profiles of some rows, one at a time, as far as time and memory allow."""

    def __init__(self, connection: sqlite3.Connection, rows: Sequence[tuple[int, int]]) -> None:
        self.count = 0
        self._connection = connection
        self._rows = rows
        self._deadline = time.monotonic() + MERGE_S

    def merged(self) -> Profile:
        """Their sum, without the damaged ones."""
        try:
            return pprof.merge(self._read(_unchecked))
        except pprof.ProfileError:
            # Checking each takes as long as adding it up, and damaged ones are rare.
            return pprof.merge(self._read(pprof.loads))

    def _read(self, parse: Callable[[bytes], Profile]) -> Iterator[Profile]:
        self.count = 0
        for place in self._rows:
            # One by one: a long read would keep the writer's log from being moved into the file.
            # The number of a row that has expired may be another profile's by now.
            found = self._connection.execute("SELECT pprof FROM profiles WHERE id = ? AND job = ?", place)
            for (blob,) in found.fetchall():
                with contextlib.suppress(pprof.ProfileError):
                    profile = parse(blob)
                    self.count += 1
                    yield profile
            if time.monotonic() > self._deadline:
                raise ControllerError(f"merging took longer than {MERGE_S:.0f} s; {REMEDY}")
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MAX_MEMORY_BYTES:
                raise ControllerError(f"merging takes more than {MAX_MEMORY_BYTES >> 20} MiB; {REMEDY}")


def _unchecked(blob: bytes) -> Profile:
    """A profile as it was when it came in; whether it holds together is not looked at."""
    try:
        return Profile.FromString(zlib.decompress(blob, wbits=31))
    except (zlib.error, DecodeError) as error:
        raise pprof.ProfileError(f"the profile is damaged: {error}") from None


def main() -> None:
    """Read the rows from stdin, write the number of profiles and their sum to stdout."""
    with contextlib.suppress(OSError):  # not allowed everywhere
        os.nice(10)
    rows = list(_ROW.iter_unpack(sys.stdin.buffer.read()))
    try:
        connection = schema.open_reader(Path(sys.argv[1]))
        try:
            parts = _Parts(connection, rows)
            packed = pprof.dumps(parts.merged())
        finally:
            connection.close()
        if len(packed) > MAX_MERGED_BYTES:
            raise ControllerError(f"the merged profile is larger than {MAX_MERGED_BYTES >> 20} MiB; {REMEDY}")
    except (ControllerError, pprof.ProfileError, sqlite3.Error) as error:
        sys.exit(f"error: {error}")
    sys.stdout.buffer.write(_COUNT.pack(parts.count) + packed)


if __name__ == "__main__":
    main()
