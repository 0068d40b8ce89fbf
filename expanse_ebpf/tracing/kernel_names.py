"""Names of the kernels that a window saw: of host stubs by their addresses, of CUfunctions by their handles.

Addresses are looked up by processes of their own (see symbols.py), one for each process that was traced,
which never keep the window waiting; whatever becomes of them is told as the reason of their addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import NamedTuple

from expanse_ebpf.text import clean
from expanse_ebpf.tracing.symbols import ENDED, LONGEST_LINE, LONGEST_NAME, MOST_LINES

MOST_KERNELS = 10_000
_MOST_AT_ONCE = 2
_DEADLINE_S = 15.0
_LARGEST_ANSWER = 32 << 20
_NAMES = 0  # stands for no process: names that are only to be demangled

TOO_MANY = f"more than {MOST_KERNELS} kernels"
NOT_YET = "the window ended before it was looked up"
NO_HANDLE = "its module was loaded before the window"


class KernelName(NamedTuple):
    """A kernel as far as it is known: the same whatever process, and wherever it has the file."""

    name: str  # demangled; empty: not known
    module: str  # path of the file; empty: not known
    offset: int  # of the host stub in that file
    reason: str  # why there is no name, or that the address is not the beginning of that function

    @property
    def key(self) -> tuple[str, str | int]:
        """What tells it from other kernels."""
        return (self.module, self.name or self.offset)


class _Lookup:
    """A process that looks up addresses of `pid`, or demangles names. Raises OSError if it cannot be."""

    def __init__(self, pid: int, wanted: list[int | str]) -> None:
        self.pid, self.wanted = pid, wanted
        self.ends_at = time.monotonic() + _DEADLINE_S
        # Files in memory, not pipes: nobody ever waits for the other to read.
        with contextlib.ExitStack() as ours:
            question = os.memfd_create("expanse-symbols-wanted", os.MFD_CLOEXEC)
            ours.callback(os.close, question)
            with os.fdopen(question, "wb", closefd=False) as file:
                file.write("".join(f"{each}\n" for each in wanted).encode())
            os.lseek(question, 0, os.SEEK_SET)
            self._answer = os.memfd_create("expanse-symbols", os.MFD_CLOEXEC)
            ours.callback(os.close, self._answer)
            self.process = subprocess.Popen(
                [sys.executable, "-EsP", "-m", "expanse_ebpf.tracing.symbols", str(pid)],
                stdin=question,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
            )
            ours.pop_all()
            os.close(question)

    def ended(self) -> bool:
        """Whether it has; one that takes too long is ended."""
        if self.process.poll() is None and time.monotonic() >= self.ends_at:
            self.process.kill()
            self.process.wait()
        return self.process.returncode is not None

    def answers(self) -> list[dict[str, object]]:
        """What it found, after it has ended or been killed."""
        data = os.pread(self._answer, _LARGEST_ANSWER, 0)
        found = []
        for line in data.splitlines():
            with contextlib.suppress(ValueError):  # the last line of one that died
                answer = json.loads(line)
                if isinstance(answer, dict):
                    found.append(answer)
        return found

    def why(self) -> str:
        """Why it did not answer everything."""
        status = self.process.returncode or 0
        if time.monotonic() >= self.ends_at:
            return f"its file took more than {_DEADLINE_S:.0f} s to read"
        return f"reading its file ended with {f'signal {-status}' if status < 0 else f'status {status}'}"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._answer)


class KernelNames:
    """The names that one window needs. Nothing here waits, close() and finish() aside."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], KernelName] = {}
        self._handles: dict[tuple[int, int], str] = {}
        self._demangled: dict[str, str] = {}
        self._wanted: dict[int, dict[int | str, None]] = {}  # in order, each once
        self._asked: set[tuple[int, int | str]] = set()
        self._lookups: list[_Lookup] = []

    def want(self, pid: int, address: int) -> None:
        """Look up a host stub of a process at the next resolve()."""
        self._want(pid, address)

    def note_handle(self, pid: int, handle: int, name: str) -> None:
        """A kernel's (mangled) name that a process has asked this CUfunction for."""
        if (pid, handle) in self._handles or len(self._handles) < MOST_KERNELS:
            name = name if len(name) < LONGEST_LINE else clean(name, LONGEST_NAME)
            self._handles[pid, handle] = name
            if name.startswith("_Z") and name.isprintable() and name.isascii():
                self._want(_NAMES, name)

    def resolve(self) -> None:
        """Take in what was found, and look up what is new; to be called about once a second."""
        for lookup in [each for each in self._lookups if each.ended()]:
            self._lookups.remove(lookup)
            self._take(lookup)
        while self._wanted and len(self._lookups) < _MOST_AT_ONCE:
            pid, wanted = next(iter(self._wanted.items()))
            some = list(wanted)[:MOST_LINES]
            for each in some:
                del wanted[each]
            if not wanted:
                del self._wanted[pid]
            if pid != _NAMES and not _has_memory(pid):
                self._settle(pid, some, ENDED)  # a job may have thousands of those
                continue
            try:
                self._lookups.append(_Lookup(pid, some))
            except OSError as error:
                self._settle(pid, some, f"symbols cannot be read: {error.strerror}")

    def finish(self, limit_s: float) -> None:
        """Wait until all is known, or for so many seconds."""
        ends_at = time.monotonic() + limit_s
        self.resolve()
        while self._lookups and time.monotonic() < ends_at:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._lookups[0].process.wait(min(0.1, max(ends_at - time.monotonic(), 0)))
            self.resolve()

    def name(self, pid: int, address: int, is_handle: bool) -> KernelName:
        """What is known of a host stub, or of a CUfunction."""
        if is_handle:
            name = self._handles.get((pid, address))
            if name is None:
                return KernelName("", "", 0, NO_HANDLE)
            return KernelName(self._demangled.get(name) or clean(name, LONGEST_NAME), "", 0, "")
        known = self._known.get((pid, address))
        if known is None:
            return KernelName("", "", 0, NOT_YET if (pid, address) in self._asked else TOO_MANY)
        return known

    def close(self) -> None:
        """End what is still looking."""
        while self._lookups:
            self._lookups.pop().close()
        self._wanted.clear()

    def _want(self, pid: int, wanted: int | str) -> None:
        if (pid, wanted) not in self._asked and len(self._asked) < MOST_KERNELS:
            self._asked.add((pid, wanted))
            self._wanted.setdefault(pid, {})[wanted] = None

    def _take(self, lookup: _Lookup) -> None:
        left = dict.fromkeys(lookup.wanted)
        for answer in lookup.answers():
            each, name = answer.get("address", answer.get("mangled")), answer.get("name")
            if not isinstance(each, int | str) or each not in left or not isinstance(name, str):
                continue
            del left[each]
            module, offset, reason = (answer.get(field) for field in ("module", "offset", "reason"))
            if isinstance(each, str):
                self._demangled[each] = clean(name, LONGEST_NAME)
            elif isinstance(module, str) and isinstance(offset, int) and isinstance(reason, str):
                self._known[lookup.pid, each] = KernelName(
                    clean(name, LONGEST_NAME), clean(module, LONGEST_NAME), offset, clean(reason)
                )
        self._settle(lookup.pid, list(left), lookup.why())
        lookup.close()

    def _settle(self, pid: int, wanted: list[int | str], reason: str) -> None:
        for each in wanted:
            if isinstance(each, int):
                self._known[pid, each] = KernelName("", "", 0, reason)


def _has_memory(pid: int) -> bool:
    """Whether there is anything to look up in; what cannot be read may still be found out by its reader."""
    try:
        with open(f"/proc/{pid}/maps", "rb", buffering=0) as file:
            return bool(file.read(1))
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
