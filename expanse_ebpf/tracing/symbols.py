"""Names of functions in a process: `python -m expanse_ebpf.tracing.symbols PID`, a short-lived process.

Its stdin has one address or one mangled C++ name a line, its stdout one JSON object for each, in order:

    {"address": 94211, "name": "add(float*)", "module": "/usr/bin/train", "offset": 4531, "reason": ""}
    {"mangled": "_Z3addPf", "name": "add(float*)"}

`offset` is that in the file `module`, whatever the address; `reason` says why there is no name, or that the
address is not the beginning of the function. BCC's symbol cache finds the name, in the mount namespace of the
process. The files are those of somebody's job, read by code in C: so a process of its own, with limits.

BCC is called by its C interface: its Python module is that of the system's Python, and costs 3 MiB and
35 ms beside the 65 MiB and 70 ms of the library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from expanse_ebpf.text import clean

MOST_LINES = 2000
LONGEST_NAME = 1024
LONGEST_LINE = 8192
_MEMORY = 1 << 30
_MEMORY_FOR_A_NAME = 32 << 20
_CPU_S = 10
_OUTPUT = 32 << 20
_LARGEST_MAPS = 32 << 20
_PR_SET_PDEATHSIG = 1

_LIBRARY = "libbcc.so.0"
NO_BCC = "BCC is not installed: apt-get install python3-bpfcc"
NO_SYMBOL = "no symbol"
DELETED = "its file has been deleted"
ENDED = "the process has ended"
NOT_A_FILE = "its code is in no file"

_STUB = "__device_stub_"
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ..x. ([0-9a-f]+) \S+ (\d+) *([^\n]*)")


class Mapping(NamedTuple):
    """Memory that holds code; `file` is its path, empty where it has none."""

    start: int
    end: int
    offset: int
    file: str


class Symbol(NamedTuple):
    """What BCC knows of an address: the function's (mangled) name and how far after its beginning."""

    name: str
    into: int


def executable(maps: bytes) -> list[Mapping]:
    """The executable mappings in the text of a /proc/PID/maps."""
    found = []
    for line in maps.splitlines():
        match = _MAPPING.match(line)
        if match:
            start, end, offset = (int(match[number], 16) for number in (1, 2, 3))
            file = match[5] if match[4] != b"0" else b""
            found.append(Mapping(start, end, offset, clean(file, LONGEST_NAME)))
    return found


def kernel_name(function: str, demangle: Callable[[str], str]) -> str:
    """The kernel whose host stub has this demangled name.

    nvcc gives the stub the name of the kernel, or __device_stub_ and the kernel's mangled name; what is in
    brackets behind it are the stub's own arguments then.
    """
    _, stub, kernel = function.partition(_STUB)
    if not stub:
        return function
    mangled = re.match(r"_Z\w+", kernel)
    return demangle(mangled[0]) if mangled else kernel.lstrip("_")


class Demangler:
    """The C++ runtime's own, which BCC uses too; gives names back as they are where there is none."""

    def __init__(self) -> None:
        self._demangle: Any = None
        try:
            self._demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
        except (OSError, AttributeError):
            return
        self._demangle.restype = ctypes.c_void_p
        self._demangle.argtypes = (ctypes.c_char_p, *[ctypes.c_void_p] * 3)
        libc = ctypes.CDLL(None)
        self._free, self._length = libc["free"], libc["strnlen"]
        self._free.argtypes = (ctypes.c_void_p,)
        self._length.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._length.restype = ctypes.c_size_t

    def __call__(self, name: str) -> str:
        """The name in C++, or as it is."""
        if self._demangle is None or not name.startswith("_Z"):
            return name
        # A name of some hundred characters can stand for one of gigabytes, as each part of it may be what
        # came before, twice.
        with _memory_limit(_MEMORY_FOR_A_NAME):
            place = self._demangle(name.encode("utf-8", "surrogateescape"), None, None, None)
        if not place:
            return name
        try:
            return ctypes.string_at(place, self._length(place, 4 * LONGEST_NAME)).decode("utf-8", "replace")
        finally:
            self._free(place)


@contextlib.contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """Let this process take no more than so many bytes besides what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb", buffering=0) as file:
        pages = int(file.read(256).split()[0])
    wanted = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft < 0 else min(wanted, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _BccSymbol(ctypes.Structure):
    """struct bcc_symbol of bcc_syms.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("demangle_name", ctypes.c_char_p),
        ("module", ctypes.c_char_p),
        ("offset", ctypes.c_uint64),
    )


class SymbolCache:
    """BCC's, of one process. Raises OSError where BCC is not installed."""

    def __init__(self, pid: int) -> None:
        self._bcc = ctypes.CDLL(_LIBRARY)
        self._bcc.bcc_symcache_new.restype = ctypes.c_void_p
        self._bcc.bcc_symcache_new.argtypes = (ctypes.c_int, ctypes.c_void_p)
        symbol = ctypes.POINTER(_BccSymbol)
        # Not the one that demangles, which puts no bounds to it.
        self._resolve = self._bcc.bcc_symcache_resolve_no_demangle
        self._resolve.argtypes = (ctypes.c_void_p, ctypes.c_uint64, symbol)
        self._cache = self._bcc.bcc_symcache_new(pid, None)

    def resolve(self, address: int) -> Symbol | None:
        """The function there, if it is known."""
        symbol = _BccSymbol()
        if not self._cache or self._resolve(self._cache, address, ctypes.byref(symbol)) < 0:
            return None
        name = symbol.name
        return Symbol(name.decode("utf-8", "replace"), symbol.offset) if name else None


def lines(wanted: IO[str]) -> Iterator[int | str]:
    """The addresses and names that are asked for; what is neither is left out."""
    for _ in range(MOST_LINES):
        line = wanted.readline(LONGEST_LINE)
        if not line:
            return
        text = line.strip()
        if text.startswith("_Z"):
            yield text
            continue
        try:
            address = int(text, 0)
        except ValueError:
            continue
        if 0 <= address < 1 << 64:
            yield address


def answers(pid: int, wanted: Iterable[int | str]) -> Iterator[dict[str, str | int]]:
    """An object for each, as the module says."""
    demangle = Demangler()
    maps = _maps(pid)
    cache: SymbolCache | None = None
    missing = ""
    for each in wanted:
        if isinstance(each, str):
            yield {"mangled": each, "name": clean(demangle(each), LONGEST_NAME)}
            continue
        if cache is None and not missing:
            try:
                cache = SymbolCache(pid)
            except OSError:
                missing = NO_BCC
        mapping = next((m for m in maps if m.start <= each < m.end), None)
        found = cache.resolve(each) if cache and mapping and mapping.file else None
        name = kernel_name(demangle(found.name), demangle) if found else ""
        yield {
            "address": each,
            "name": clean(name, LONGEST_NAME),
            "module": mapping.file if mapping else "",
            "offset": each - mapping.start + mapping.offset if mapping else 0,
            "reason": _reason(bool(maps), mapping, found, missing),
        }


def _reason(alive: bool, mapping: Mapping | None, found: Symbol | None, missing: str) -> str:
    if not alive:
        return ENDED
    if mapping is None or not mapping.file:
        return NOT_A_FILE
    if found is None:
        # BCC opens what has that name now, which is another file or none.
        return missing or (DELETED if mapping.file.endswith(" (deleted)") else NO_SYMBOL)
    return f"{found.into} bytes after the beginning of that function" if found.into else ""


def _maps(pid: int) -> list[Mapping]:
    """Of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return executable(file.read(_LARGEST_MAPS))
    except OSError:
        return []


def _limit() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for what, most in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, _OUTPUT),
    ):
        _, hard = resource.getrlimit(what)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))


def main() -> None:
    """Answer, a line at a time, so that what is known already outlives a crash."""
    _limit()
    for answer in answers(int(sys.argv[1]), lines(sys.stdin)):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
