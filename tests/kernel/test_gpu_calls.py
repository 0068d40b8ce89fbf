"""Probes in a library of the test's own, by both ways of putting them there, and what their programs tell."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import cpus, gpu_calls, trials, uprobes
from expanse_ebpf.kernel.gpu_calls import Call, End, GpuCalls, Loaded, Record, Site, decode, gap_bound_ns
from expanse_ebpf.kernel.lifecycle import Configuration
from expanse_ebpf.kernel.python_stacks import OUTCOMES, PythonStacks
from expanse_ebpf.tracing.functions import Function, Layer

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FUNCTIONS = 8
SOURCE = (
    "".join(f"int f{n}(int x) {{ return x + {n}; }}\n" for n in range(FUNCTIONS))
    + """
#ifdef __aarch64__
asm(".globl locked\\nlocked: ldxr x0, [sp]\\nret");
#else
asm(".globl locked\\nlocked: lock; orl $0, (%rsp)\\nret");
#endif
"""
)
# Calls f0 from so many threads, so often each, whenever it is told to.
CALLER = """
import ctypes, sys, threading
f = ctypes.CDLL(sys.argv[1]).f0
print("ready", flush=True)
for line in sys.stdin:
    threads = [threading.Thread(target=lambda: [f(1) for _ in range(25)]) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print("called", flush=True)
"""


# ---- records


class CallRecord(ctypes.Structure):
    """struct call_record of bpf/gpu_calls.bpf.c, with its struct call."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("kind", "row")),
        ("time_ns", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("point", "outcome", "stack", "unused")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("shared", "copy")),
        *((name, ctypes.c_uint64) for name in ("stream", "target", "bytes")),
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 6), st.binary(max_size=400))
def test_any_bytes_are_a_record_or_none(kind: int, rest: bytes) -> None:
    record = decode(struct.pack("=I", kind) + rest)
    if not 1 <= kind <= 4:
        assert record is None
    decode(rest)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=ctypes.sizeof(CallRecord), max_size=ctypes.sizeof(CallRecord)), st.integers(0, 20))
def test_a_call(data: bytes, outcome: int) -> None:
    record = CallRecord.from_buffer_copy(data)
    record.kind, record.outcome = 1, outcome
    said = decode(bytes(record))
    assert isinstance(said, Call)
    assert said == Call(
        record.row,
        record.time_ns,
        record.point,
        OUTCOMES[outcome] if outcome < len(OUTCOMES) else "",
        record.stack,
        tuple(record.grid),
        tuple(record.block),
        record.shared,
        record.copy,
        record.stream,
        record.target,
        record.bytes,
    )
    assert all(decode(bytes(record)[:size]) is None for size in range(len(data)))


@settings(max_examples=50, deadline=None)
@given(u32, u64, u64)
def test_ends_and_places(number: int, first: int, second: int) -> None:
    end = struct.pack("=IIQQ", 2, number, first, second)
    assert decode(end) == End(number, first, second)
    assert decode(end[:-1]) is None
    place = struct.pack("=IIQ", 3, number, first)
    assert decode(place) == Site(number, first)
    assert decode(place[:-1]) is None


@settings(max_examples=50, deadline=None)
@given(u32, u64, st.binary(max_size=255).filter(lambda name: b"\0" not in name), st.binary(max_size=255))
def test_a_kernel_that_was_loaded(pid: int, handle: int, name: bytes, after: bytes) -> None:
    data = struct.pack("=IIQ", 4, pid, handle) + (name + b"\0" + after)[:256].ljust(256, b"\0")
    assert decode(data) == Loaded(pid, handle, name)


# ---- gaps


def bucket_of(ns: int) -> int:
    """As count_gap of bpf/gpu_calls.bpf.c has it."""
    power = 0
    while 2 << power <= ns | 8:
        power += 1
    return ns if ns < 8 else (power - 2) * 8 + (ns >> (power - 3)) % 8


@settings(deadline=None)
@given(st.one_of(st.integers(0, 2**63 - 1), st.integers(0, 100), st.integers(3, 62).map(lambda n: 1 << n)))
@example(7)
@example(8)
def test_a_gap_lies_below_the_bound_of_its_bucket_and_not_below_that_of_the_one_before(ns: int) -> None:
    bucket = bucket_of(ns)
    assert 0 <= bucket < 512
    assert ns < gap_bound_ns(bucket)
    assert bucket == 0 or ns >= gap_bound_ns(bucket - 1)
    assert bucket < 8 or gap_bound_ns(bucket) - gap_bound_ns(bucket - 1) <= ns / 8


# ---- in the kernel


class Library:
    """A library with functions to probe, mapped by this process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "libprobed.so"
        source = folder / "probed.c"
        source.write_text(SOURCE)
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", self.path, source], check=True)
        self.functions = ctypes.CDLL(str(self.path))

    def address(self, name: str) -> int:
        return ctypes.cast(self.functions[name], ctypes.c_void_p).value or 0

    def offset(self, name: str) -> int:
        """Where a function is in the file."""
        address = self.address(name)
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, *_ = line.split()
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= address < end:
                return address - start + int(offset, 16)
        raise AssertionError(f"{name} is not mapped")

    def code(self, name: str) -> bytes:
        """Its first bytes, as they are in memory."""
        return ctypes.string_at(self.address(name), 4)

    def call(self, number: int, times: int) -> None:
        function = self.functions[f"f{number}"]
        for _ in range(times):
            assert function(1) == number + 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("probed"))


class Caller:
    """A process that calls f0 a hundred times, in four threads."""

    def __init__(self, library: Library) -> None:
        command = [sys.executable, "-S", "-c", CALLER, str(library.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def call(self) -> None:
        """Have it call, and end."""
        said, _ = self._process.communicate("\n", timeout=30)
        assert said == "called\n"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def callers(library: Library) -> Iterator[list[Caller]]:
    """Two. To be made before the programs, which look at what is forked by who is looked at."""
    made = [Caller(library) for _ in range(2)]
    yield made
    for caller in made:
        caller.close()


class Traced:
    """The programs, which look at this process, and their records."""

    def __init__(self, by: str) -> None:
        self.records: list[Record] = []
        self.stacks = PythonStacks(lambda record: None, 0)
        configuration = Configuration(0, 0, 0, cpus.count())
        try:
            self.calls = GpuCalls(self.records.append, self.stacks, configuration, by=by)
        except UnavailableError:
            self.stacks.close()
            raise
        self.stacks.want(os.getpid())
        self.calls.window.counting = 1

    def place(self, library: Library, name: str, *, timed: bool = False) -> tuple[int, int]:
        """Where a function is, and the cookie for a probe there; its total has the cookie as its row."""
        function = Function(name, Layer.RUNTIME, "launch", timed=timed)
        total = self.calls.add_total()
        cookie = self.calls.add_point(function, total, 1 << 20, 1 << 20, stepped=False)
        assert cookie == total
        return library.offset(name), cookie

    def counted(self) -> list[int]:
        return [self.calls.total(row).calls for row in range(FUNCTIONS)]

    def consume(self) -> list[Call]:
        while self.calls.consume(1000):
            pass
        return [record for record in self.records if isinstance(record, Call)]

    def close(self) -> None:
        self.calls.close()
        self.stacks.close()


@pytest.fixture(params=[uprobes.MULTI, uprobes.PERF])
def traced(request: pytest.FixtureRequest) -> Iterator[Traced]:
    made = Traced(request.param)
    yield made
    made.close()


def links() -> int:
    """Links of BPF programs, and perf events, that this process holds."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:  # that of the folder itself
            continue
        found += target.startswith("anon_inode:") and ("bpf" in target and "link" in target)
        found += target == "anon_inode:[perf_event]"
    return found


def test_each_probe_bears_its_own_number_and_all_are_gone_after_it(traced: Traced, library: Library) -> None:
    names = [f"f{number}" for number in range(FUNCTIONS)]
    code, held = [library.code(name) for name in names], links()
    assert traced.calls.calls.attach(str(library.path), [traced.place(library, name) for name in names]) == {}
    assert traced.calls.calls.count == FUNCTIONS
    assert all(library.code(name) != was for name, was in zip(names, code, strict=True))
    assert links() - held == (1 if traced.calls.method == uprobes.MULTI else 2 * FUNCTIONS)
    for number in range(FUNCTIONS):
        library.call(number, number + 1)
    assert traced.counted() == [number + 1 for number in range(FUNCTIONS)]
    assert Counter(call.point for call in traced.consume()) == {n: n + 1 for n in range(FUNCTIONS)}
    traced.calls.detach()
    assert traced.calls.calls.count == 0
    assert [library.code(name) for name in names] == code
    assert links() == held
    library.call(0, 10)
    assert traced.counted()[0] == 1


def test_nothing_is_left_after_the_end(library: Library) -> None:
    gc.collect()  # maps that are mapped have a descriptor each
    held, code = set(Path("/proc/self/fd").iterdir()), library.code("f0")

    def trace(by: str) -> None:
        made = Traced(by)
        made.calls.calls.attach(str(library.path), [made.place(library, "f0"), made.place(library, "f1")])
        made.close()
        assert library.code("f0") == code
        made.close()

    for by in (uprobes.MULTI, uprobes.PERF):
        trace(by)
        gc.collect()
        assert set(Path("/proc/self/fd").iterdir()) == held


def test_a_place_that_is_refused_does_not_keep_the_others_from_their_probes(
    traced: Traced, library: Library
) -> None:
    good = [traced.place(library, name) for name in ("f0", "f1")]
    locked, beyond = library.offset("locked"), library.path.stat().st_size + 4096
    refused = traced.calls.calls.attach(str(library.path), [good[0], (locked, 6), (beyond, 7), good[1]])
    assert refused == {locked: uprobes.NO_PLACE, beyond: os.strerror(errno.EINVAL)}
    assert traced.calls.calls.count == 2
    library.call(0, 2)
    library.call(1, 3)
    assert traced.counted()[:2] == [2, 3]
    assert traced.calls.calls.attach(str(library.path / "no"), good) == dict.fromkeys(
        (offset for offset, _ in good), os.strerror(errno.ENOTDIR)
    )


def test_a_probe_for_one_process_is_for_all_its_threads_and_for_no_other(
    callers: list[Caller], traced: Traced, library: Library
) -> None:
    place = traced.place(library, "f0")
    assert traced.calls.calls.attach(str(library.path), [place], callers[0].pid) == {}
    for caller in callers:
        traced.stacks.want(caller.pid)
        caller.call()
    library.call(0, 10)
    threads = traced.calls.threads()
    assert [(thread.pid, thread.calls) for thread in threads] == [(callers[0].pid, 25)] * 4
    assert len({thread.tid for thread in threads} - {callers[0].pid}) == 4
    assert traced.counted()[0] == 100
    assert traced.calls.window.foreign_hits == 0


def test_gaps_are_those_between_the_calls_of_a_thread(traced: Traced, library: Library) -> None:
    traced.calls.calls.attach(str(library.path), [traced.place(library, "f0")])

    def work() -> None:
        for pause_us in (0, 0, 0, 10, 200, 3000, 0, 20_000):
            library.call(0, 20)
            time.sleep(pause_us / 1e6)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = Counter[int]()
    calls = traced.consume()
    for row in range(2):
        times = [call.time_ns for call in calls if call.row == row]
        assert len(times) == 160
        expected.update(bucket_of(after - before) for before, after in pairwise(times))
    assert dict(traced.calls.gaps()) == expected


def test_threads_of_others_are_hits_and_no_calls(
    callers: list[Caller], traced: Traced, library: Library
) -> None:
    traced.calls.calls.attach(str(library.path), [traced.place(library, "f0")])
    callers[0].call()
    assert traced.calls.window.foreign_hits == 100
    assert traced.counted()[0] == 0
    assert traced.calls.threads() == []


def test_where_a_call_returns_to_is_told_once_and_its_end_from_then_on(
    traced: Traced, library: Library
) -> None:
    traced.calls.calls.attach(str(library.path), [traced.place(library, "f0", timed=True)])
    library.call(0, 2)
    traced.consume()
    (site,) = [record for record in traced.records if isinstance(record, Site)]
    assert site.pid == os.getpid()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *path = line.split(None, 5)
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= site.address < end:
            place = (site.address - start + int(offset, 16), GpuCalls.return_cookie(stepped=False))
            assert traced.calls.returns.attach(path[0], [place], os.getpid()) == {}
    assert traced.calls.returns.count == 1
    library.call(0, 3)
    traced.consume()
    ends = [record for record in traced.records if isinstance(record, End)]
    total = traced.calls.total(0)
    assert (len(ends), total.timed) == (3, 3)
    assert sum(end.duration_ns for end in ends) == total.time_ns > 0
    # The last of the first two calls was open when the next one began.
    assert traced.calls.window.unpaired == 2


def test_tables_that_are_full_say_so(traced: Traced) -> None:
    function = Function("f", Layer.RUNTIME, "launch")
    for _ in range(4096):
        traced.calls.add_point(function, 0, 0, 0, stepped=False)
    with pytest.raises(UnavailableError, match="too many probe points"):
        traced.calls.add_calibration()
    assert traced.calls.add_total(2048) == 0
    with pytest.raises(UnavailableError, match="too many functions"):
        traced.calls.add_total()


# ---- where it cannot be


def test_without_attach_cookies_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_calls.supported() == ""
    monkeypatch.setattr(trials, "load_attach_cookie", lambda: errno.EINVAL)
    reason = f"{os.uname().release} has no attach cookies, probes cannot be told apart: no deep traces; boot "
    assert gpu_calls.supported() == f"{reason}Linux 5.15 or newer"
    with pytest.raises(UnavailableError, match="no attach cookies"):
        Traced("")
    # Whoever may not load programs learns that from loading them.
    monkeypatch.setattr(trials, "load_attach_cookie", lambda: errno.EPERM)
    assert gpu_calls.supported() == ""


def test_without_uprobe_multi_each_probe_is_a_perf_event(
    monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    assert uprobes.method() == uprobes.MULTI
    monkeypatch.setattr(trials, "link_uprobe_multi", lambda: errno.EINVAL)
    made = Traced("")
    try:
        assert made.calls.method == uprobes.PERF
        made.calls.calls.attach(str(library.path), [made.place(library, "f0")])
        library.call(0, 5)
        assert made.counted()[0] == 5
    finally:
        made.close()
