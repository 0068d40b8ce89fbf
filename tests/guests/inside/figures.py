"""The BPF programs on the kernel at hand: all load and attach, and their figures are the kernel's own.

Writes what was found to /out/figures.json and ends with 1 when a figure was wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, "/payload/files")
from groups import Groups, wait_stopped
from truth import faults, migrations, run_ns, switches, usage_ns, wait_ns

from expanse_ebpf.jobs.hierarchies import numbers
from expanse_ebpf.kernel import libbpf, perf, trials
from expanse_ebpf.kernel import lifecycle as kernel
from expanse_ebpf.kernel.accounting import Accounting
from expanse_ebpf.kernel.cpus import online
from expanse_ebpf.kernel.lifecycle import Event, Lifecycle
from expanse_ebpf.kernel.slots import SLOT_SYSTEM

# Parts that are wanted only where a kernel has what they need.
NEEDS = {"python_waits": trials.link_sleepable_task_iterator, "gpu_calls": trials.load_attach_cookie}
CPU = 1  # where what must share a CPU runs; the test itself runs on CPU 0
STOP = "os.kill(os.getpid(), signal.SIGSTOP)\n"
# Fresh pages, work and short sleeps, so that processes on one CPU interrupt each other.
INTERLEAVED = """
import mmap
m = mmap.mmap(-1, 4096 * 300)
for i in range(300):
    m[i * 4096] = 1
    for j in range(1500): pass
    if i % 2: time.sleep(0.0005)
"""


class Book:
    """What was compared.

    Counts must be equal; of page faults up to two per process may come while it stops, which one side sees
    and the other does not. Times may differ by what the scheduler itself takes, when
    it looks for other work before a CPU goes idle: the job pays for that here, nobody in schedstat.
    """

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def compare(
        self,
        what: str,
        got: float,
        low: float,
        high: float | None = None,
        *,
        rel: float = 0,
        least: float = 1,
    ) -> None:
        """`got` must lie between `low` and `high`, give or take `rel`, and the figure must have moved at all.

        Without `high` it must be `low`. Below `least` the comparison would say nothing.
        """
        high = low if high is None else high
        right = low * (1 - rel) <= got <= high * (1 + rel) and got >= least
        self.lines.append({"what": what, "got": got, "low": low, "high": high, "rel": rel, "right": right})
        print("right" if right else "WRONG", what, got, low, high, flush=True)

    def nothing(self, what: str, got: float) -> None:
        """`got` must be 0."""
        self.compare(what, got, 0, least=0)

    def holds(self, what: str, right: object) -> None:
        """`right` must be true."""
        self.compare(what, int(bool(right)), 1)

    def close(self, file: str, **more: object) -> int:
        """Write everything to /out; the exit code."""
        Path("/out", file).write_text(json.dumps({"figures": self.lines, **more}, indent=1))
        wrong = [line["what"] for line in self.lines if not line["right"]]
        print(f"{len(self.lines)} compared, {len(wrong)} wrong: {wrong}")
        return 1 if wrong else 0


# ---- what the kernel says itself


def run_queues() -> list[tuple[int, int, int]]:
    """Per CPU since boot: ns run and ns waited by tasks that have left it, and tasks that came to it."""
    lines = Path("/proc/schedstat").read_text().splitlines()
    rows = [[int(word) for word in line.split()[7:10]] for line in lines if line.startswith("cpu")]
    return [(run, wait, came) for run, wait, came in rows]


def forks() -> int:
    lines = Path("/proc/stat").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("processes")))


# ---- the collector's side


class Collector:
    """Lifecycle and accounting, with one software event in each place of a hardware counter."""

    def __init__(self, hierarchy: str = "unified", number: int | None = None) -> None:
        if number is None:
            number = next(n for n, name in numbers().items() if name == hierarchy)
        self.events: list[Event] = []
        self.lifecycle = Lifecycle(hierarchy, number, self.events.append)
        self.counters = perf.open_on_cpus(list(perf.SOFTWARE.values()), online())
        fds = [
            {cpu: fd for (name, cpu), fd in self.counters.descriptors.items() if name == counter}
            for counter in perf.SOFTWARE
        ]
        self.accounting = Accounting(self.lifecycle, fds)
        self.accounting.attach()

    def slot(self, group: Path) -> int:
        slot = self.lifecycle.take()
        self.lifecycle.assign(group.stat().st_ino, slot)
        return slot

    def total(self, slot: int) -> list[int]:
        self.accounting.flush()
        return self.lifecycle.slots.total(slot)

    def counter(self, total: list[int], name: str) -> int:
        return total[kernel.COUNTERS + 3 * list(perf.SOFTWARE).index(name)]

    def everything(self) -> list[int]:
        """The sum of all slots: the jobs, and everything that belongs to no job."""
        self.accounting.flush()
        return [
            sum(column)
            for column in zip(*(self.lifecycle.row(s) for s in range(kernel.MAX_SLOTS)), strict=True)
        ]

    def close(self) -> None:
        self.accounting.close()
        self.lifecycle.close()
        self.counters.close()


def grown(before: list[int], after: list[int]) -> list[int]:
    return [b - a for a, b in zip(before, after, strict=True)]


def settle(pids: Iterable[int]) -> None:
    """Until these stopped processes are off their CPUs, however slow the machine is."""
    pids = list(pids)
    seen: list[tuple[int, int]] = []
    while (now := [(switches(pid), run_ns(pid)) for pid in pids]) != seen:
        seen = now
        time.sleep(0.1)


Reading = Callable[[int], int]


def between_stops(
    collector: Collector,
    slots: Iterable[int],
    processes: list[subprocess.Popen[str]],
    readings: Iterable[Reading],
) -> tuple[dict[int, list[int]], dict[tuple[int, Reading], int]]:
    """Let stopped processes do their work up to their next stop.

    What each slot grew by, and by (pid, reading) what the kernel says of each process.
    """
    slots, readings = list(slots), list(readings)
    pids = [process.pid for process in processes]
    for process in processes:
        wait_stopped(process, 120)
    settle(pids)
    before = {slot: collector.total(slot) for slot in slots}
    was = {(pid, read): read(pid) for pid in pids for read in readings}
    for process in processes:
        process.send_signal(signal.SIGCONT)
    time.sleep(0.05)
    for process in processes:
        wait_stopped(process, 120)
    settle(pids)
    return (
        {slot: grown(before[slot], collector.total(slot)) for slot in slots},
        {(pid, read): read(pid) - was[pid, read] for pid in pids for read in readings},
    )


class Whole:
    """All slots together against the run queues' own account, over the time between two readings."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._start = self._read()

    def _read(self) -> tuple[list[int], list[int], list[int]]:
        """The kernel's figures, ours, and the kernel's once more, since it does not stand still meanwhile.

        The kernel books what a task has run when it leaves its CPU; that it does by sleeping.
        """
        time.sleep(0.002)
        first = self._machine()
        ours = self._collector.everything()
        time.sleep(0.002)
        return first, ours, self._machine()

    @staticmethod
    def _machine() -> list[int]:
        run, wait, came = (sum(column) for column in zip(*run_queues(), strict=True))
        return [run, wait, came, forks()]

    def compare(self, book: Book, when: str) -> None:
        (low_start, ours_start, high_start), (low_end, ours_end, high_end) = self._start, self._read()
        ours = grown(ours_start, ours_end)
        # A task that is on a CPU at a reading has come there and not left yet.
        cpus = len(online())
        bounds = zip(grown(high_start, low_end), grown(low_start, high_end), strict=True)
        run, wait, came, forked = bounds
        for what, index, (low, high), rel, least in (
            ("run time", kernel.RUN_NS, run, 0.01, 1e8),
            # What a thread of the kernel has waited before it was first seen, and pulled, is not known.
            ("wait", kernel.WAIT_NS, wait, 0.05, 1e6),
            # From 5.16 on schedstat leaves out some that come back after they were preempted on their way to
            # sleep (sched_info_arrive returns early): the kernel's own counts of switches have them.
            ("switches", kernel.SWITCHES, (came[0] - cpus, came[1] + cpus), 0.02, 100),
            ("forks", kernel.FORKS, forked, 0, 0),
        ):
            what = f"{when}: {what}, jobs + system = whole machine"
            book.compare(what, ours[index], low, high, rel=rel, least=least)


# ---- the parts


def load_everything(book: Book) -> dict[str, dict[str, dict[str, Any]]]:
    """Every installed object is verified, and every program with a hook of its own is put on it."""
    library = libbpf.library()
    section = library.bpf_program__section_name
    section.restype, section.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    suffix = f".{platform.machine()}.bpf.o"
    for path in sorted(libbpf.OBJECTS.glob(f"*{suffix}")):
        name = path.name.removesuffix(suffix)
        with libbpf.Object(name) as made:
            try:
                made.load()
            except libbpf.BpfError as error:
                wanted = name not in NEEDS or NEEDS[name]() == 0
                print(error.log if wanted else f"{name}: left out here")
                book.holds(f"{name}: verified ({error})", not wanted)
                continue
            book.holds(f"{name}: verified", made.programs)
            found[name] = {}
            for program in made.programs.values():
                # "tp_btf/sched_switch" says where it goes, "raw_tp" is run by hand.
                if b"/" in section(program._pointer):
                    try:
                        program.attach()
                    except libbpf.BpfError as error:
                        print(error.log)
                    book.holds(f"{name}: {program.name} attached", program.attached)
                found[name][program.name] = sizes(program)
    return found


class Info(ctypes.Structure):
    """struct bpf_prog_info from run_cnt on, which is where it ends on old kernels."""

    _fields_ = (("rest", ctypes.c_char * 208), ("missed", ctypes.c_uint64), ("verified", ctypes.c_uint32))


def sizes(program: libbpf.Program) -> dict[str, int | None]:
    """Instructions of the loaded program, and those that the verifier went through (from 5.16 on)."""
    info, size = Info(), ctypes.c_uint32(ctypes.sizeof(Info))
    if libbpf.library().bpf_obj_get_info_by_fd(program.fd, ctypes.byref(info), size) < 0:
        raise RuntimeError(f"no information about {program.name}")
    translated = int.from_bytes(bytes(info)[20:24], sys.byteorder)
    return {"instructions": translated // 8, "verified": info.verified or None}


def load_for_v1(book: Book) -> None:
    """Where a v1 controller tells jobs apart, other code is verified, with the kernel's number of it."""
    try:
        Collector("freezer", 1).close()
    except libbpf.BpfError as error:
        print(error.log)
    else:
        book.holds("loaded for the freezer of cgroup v1", True)
        return
    book.holds("loaded for the freezer of cgroup v1", False)


def jobs_that_share_a_cpu(book: Book, collector: Collector, groups: Groups) -> None:
    """Two jobs, one of them with two processes, and one process of no job, all on one CPU."""
    paths = {name: groups.make(".", name) for name in ("a", "b")}
    slots = {name: collector.slot(path) for name, path in paths.items()}
    code = STOP + INTERLEAVED + STOP
    members = {
        "a": [groups.start(code, paths["a"], cpus={CPU}) for _ in range(2)],
        "b": [groups.start(code, paths["b"], cpus={CPU})],
    }
    nobodys = groups.start(code, cpus={CPU})
    everybody = [*members["a"], *members["b"], nobodys]
    for process in everybody:
        wait_stopped(process, 120)
    whole = Whole(collector)
    usage = {name: usage_ns(path) for name, path in paths.items()}
    readings = (switches, faults, run_ns, wait_ns)
    got, says = between_stops(collector, [*slots.values(), SLOT_SYSTEM], everybody, readings)
    usage = {name: usage_ns(path) - usage[name] for name, path in paths.items()}
    whole.compare(book, "two jobs on one CPU")
    for name, slot in slots.items():
        figures = got[slot]
        expected = {read: sum(says[p.pid, read] for p in members[name]) for read in readings}
        book.compare(f"job {name}: switches", figures[kernel.SWITCHES], expected[switches], least=150)
        pages, some = expected[faults], 2 * len(members[name])
        book.compare(
            f"job {name}: page faults", figures[kernel.PAGE_FAULTS], pages - some, pages + some, least=250
        )
        book.compare(f"job {name}: run time, schedstat", figures[kernel.RUN_NS], expected[run_ns], rel=0.03)
        book.compare(f"job {name}: run time, cpu.stat", figures[kernel.RUN_NS], usage[name], rel=0.03)
        book.compare(f"job {name}: wait", figures[kernel.WAIT_NS], expected[wait_ns], rel=0.03, least=1e6)
        # A counter that was read at each crossing must come to the same as the scheduler's own account.
        counted = collector.counter(figures, "page-faults")
        book.compare(f"job {name}: page faults as a counter", counted, pages - some, pages + some, least=250)
    # The test itself and the kernel's own threads belong to no job either.
    system, endless = got[SLOT_SYSTEM], float("inf")
    book.compare("no job: switches", system[kernel.SWITCHES], says[nobodys.pid, switches], endless, least=100)
    book.compare(
        "no job: page faults", system[kernel.PAGE_FAULTS], says[nobodys.pid, faults], endless, least=250
    )


def spread_over_cpus(book: Book, collector: Collector, groups: Groups) -> None:
    """More processes than CPUs, pulled about by the scheduler."""
    path = groups.make(".", "spread")
    slot = collector.slot(path)
    processes = [groups.start(STOP + INTERLEAVED + STOP, path) for _ in range(3)]
    for process in processes:
        wait_stopped(process, 120)
    whole = Whole(collector)
    readings = (switches, faults, run_ns, wait_ns, migrations)
    got, says = between_stops(collector, [slot], processes, readings)
    whole.compare(book, "three processes on two CPUs")
    expected = {read: sum(says[p.pid, read] for p in processes) for read in readings}
    figures = got[slot]
    pages = expected[faults]
    book.compare("spread: switches", figures[kernel.SWITCHES], expected[switches], least=250)
    book.compare("spread: page faults", figures[kernel.PAGE_FAULTS], pages - 6, pages + 6, least=750)
    book.compare("spread: run time", figures[kernel.RUN_NS], expected[run_ns], rel=0.03)
    book.compare("spread: wait", figures[kernel.WAIT_NS], expected[wait_ns], rel=0.03, least=1e6)
    book.compare("spread: migrations", figures[kernel.MIGRATIONS], expected[migrations], least=0)


def migrations_by_hand(book: Book, collector: Collector, groups: Groups) -> None:
    path, other = groups.make(".", "moving"), groups.make(".", "still")
    slot, still = collector.slot(path), collector.slot(other)
    process = groups.start(STOP + "for i in range(100): os.sched_setaffinity(0, {i % 2})\n" + STOP, path)
    got, says = between_stops(collector, [slot, still], [process], [migrations])
    book.compare("migrations", got[slot][kernel.MIGRATIONS], says[process.pid, migrations], least=99)
    book.nothing("migrations of another job", got[still][kernel.MIGRATIONS])


def forks_execs_and_exits(book: Book, collector: Collector, groups: Groups) -> None:
    path, other = groups.make(".", "forking"), groups.make(".", "calm")
    slot, calm = collector.slot(path), collector.slot(other)
    code = (
        "import threading\n" + STOP + "for i in range(12):\n"
        " t = threading.Thread(target=int); t.start(); t.join()\n"  # threads are no processes
        " pid = os.fork()\n"
        " if not pid:\n  os.execv('/bin/true', ['true']) if i % 2 else os._exit(0)\n"
        " os.waitpid(pid, 0)\n" + STOP
    )
    process = groups.start(code, path)
    wait_stopped(process, 120)
    starts = forks(), collector.everything()[kernel.FORKS], forks()
    got, _ = between_stops(collector, [slot, calm], [process], [switches])
    ends = forks(), collector.everything()[kernel.FORKS], forks()
    book.compare("forks", got[slot][kernel.FORKS], 12)
    book.compare("execs", got[slot][kernel.EXECS], 6)
    book.compare("exits", got[slot][kernel.EXITS], 12)
    processes = ends[1] - starts[1]
    book.compare(
        "forks, jobs + system, and threads = whole machine",
        processes + 12,
        ends[0] - starts[2],
        ends[2] - starts[0],
    )
    for name in ("FORKS", "EXECS", "EXITS"):
        book.nothing(f"{name.lower()} of another job", got[calm][getattr(kernel, name)])


def cgroups_come_and_go(book: Book, collector: Collector, groups: Groups) -> None:
    lifecycle = collector.lifecycle
    lifecycle.consume()
    collector.events.clear()
    top = groups.make(".", "job")
    number = top.stat().st_ino
    lifecycle.consume()
    made = [e for e in collector.events if e.kind == kernel.CGROUP_MADE]
    book.holds(
        "cgroup made: one event, with its path and id",
        [(e.path, e.cgroup, e.inherited) for e in made] == [(f"/{top.name}", number, False)],
    )
    # Accounted from its first process on, although nobody has said yet whose it is.
    process = groups.start(STOP + INTERLEAVED + STOP, top, cpus={CPU})
    got, says = between_stops(collector, [made[0].slot], [process], [switches, run_ns])
    book.compare("a new cgroup: switches", got[made[0].slot][kernel.SWITCHES], says[process.pid, switches])
    lifecycle.taken()
    slot = collector.slot(top)
    lifecycle.merge(made[0].slot, slot)
    collector.events.clear()
    below = groups.make(".", "job/step")
    lifecycle.consume()
    inherits = [(e.path, e.slot, e.inherited) for e in collector.events if e.kind == kernel.CGROUP_MADE]
    book.holds(
        "a cgroup below a job's own is the job's at once", inherits == [(f"/{top.name}/step", slot, True)]
    )
    process = groups.start(STOP + INTERLEAVED + STOP, below, cpus={CPU})
    got, says = between_stops(collector, [slot], [process], [switches, run_ns])
    book.compare("below a job's cgroup: switches", got[slot][kernel.SWITCHES], says[process.pid, switches])
    book.compare(
        "below a job's cgroup: run time", got[slot][kernel.RUN_NS], says[process.pid, run_ns], rel=0.03
    )
    moves = lifecycle.losses().moves
    (top / "cgroup.procs").write_text(str(process.pid))
    book.compare("a process moved", lifecycle.losses().moves - moves, 1)
    below.rmdir()
    groups.directories.remove(below)
    lifecycle.consume()
    removed = [e.path for e in collector.events if e.kind == kernel.CGROUP_REMOVED]
    book.holds("cgroup removed: one event", removed == [f"/{top.name}/step"])
    book.nothing("events lost", lifecycle.losses().lost)
    # Only v1 has renaming; any hierarchy will do, one without a controller too.
    v1 = Path("/run/renaming")
    v1.mkdir()
    subprocess.run(["mount", "-t", "cgroup", "-o", "none,name=renaming", "none", v1], check=True)
    (v1 / "before").mkdir()
    renames = lifecycle.losses().renames
    (v1 / "before").rename(v1 / "after")
    book.compare("a cgroup renamed", lifecycle.losses().renames - renames, 1)
    (v1 / "after").rmdir()
    subprocess.run(["umount", v1], check=True)


def executions_are_events(book: Book, collector: Collector, groups: Groups) -> None:
    path = groups.make(".", "executing")
    slot = collector.slot(path)
    collector.lifecycle.consume()
    collector.events.clear()
    groups.start("for i in range(12): os.spawnv(os.P_WAIT, '/bin/true', ['true'])", path).wait()
    collector.lifecycle.consume()
    number = path.stat().st_ino
    executed = [e for e in collector.events if e.kind == kernel.PROCESS_EXECUTED]
    book.compare("executions that are events", len(executed), kernel.EXECS_REPORTED)
    book.holds("executions name slot and cgroup", {(e.slot, e.cgroup) for e in executed} == {(slot, number)})


def cpus_by_owner(book: Book, collector: Collector, groups: Groups) -> None:
    """Without the scheduler hook a CPU is charged to its owner, whatever runs there."""
    path = groups.make(".", "owner")
    slot = collector.slot(path)
    processes = [groups.start(STOP + INTERLEAVED + STOP, path, cpus={CPU}) for _ in range(2)]
    for process in processes:
        wait_stopped(process, 120)
    collector.accounting.detach()
    collector.accounting.own({CPU: slot})
    before = run_queues()[CPU][2]
    got, says = between_stops(collector, [slot], processes, [switches, faults])
    came = run_queues()[CPU][2] - before
    least = sum(says[p.pid, switches] for p in processes)
    book.compare("owned: switches", got[slot][kernel.SWITCHES], least, came + 1, least=200)
    pages = sum(says[p.pid, faults] for p in processes)
    # Whatever else runs there may have some too.
    counted = collector.counter(got[slot], "page-faults")
    book.compare("owned: page faults as a counter", counted, pages, float("inf"), least=500)
    for name in ("RUN_NS", "WAIT_NS", "PAGE_FAULTS"):
        book.nothing(f"owned: {name.lower()} is not told apart", got[slot][getattr(kernel, name)])
    collector.accounting.attach()
    process = groups.start(STOP + INTERLEAVED + STOP, path, cpus={CPU})
    got, says = between_stops(collector, [slot], [process], [switches, run_ns])
    book.compare("hooked again: switches", got[slot][kernel.SWITCHES], says[process.pid, switches])
    book.compare("hooked again: run time", got[slot][kernel.RUN_NS], says[process.pid, run_ns], rel=0.03)


def main() -> int:
    os.sched_setaffinity(0, {0})
    book = Book()
    programs = load_everything(book)
    load_for_v1(book)
    collector = Collector()
    for holder in (collector.lifecycle, collector.accounting):
        for object_programs in programs.values():
            for name in object_programs.keys() & holder.programs.keys():
                object_programs[name] = sizes(holder.programs[name])  # with all counters
    for part in (
        jobs_that_share_a_cpu,
        spread_over_cpus,
        migrations_by_hand,
        forks_execs_and_exits,
        cgroups_come_and_go,
        executions_are_events,
        cpus_by_owner,
    ):
        groups = Groups()
        try:
            part(book, collector, groups)
        finally:
            groups.close()
    book.nothing("counters that could not be read", collector.accounting.read_errors())
    collector.close()
    return book.close("figures.json", programs=programs)


if __name__ == "__main__":
    sys.exit(main())
