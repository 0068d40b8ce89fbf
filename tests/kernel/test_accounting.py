"""The BPF programs in the running kernel, held against the kernel's own figures."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from expanse_ebpf.jobs.hierarchies import numbers
from expanse_ebpf.kernel import lifecycle as kernel
from expanse_ebpf.kernel import perf
from expanse_ebpf.kernel.accounting import Accounting
from expanse_ebpf.kernel.cpus import online
from expanse_ebpf.kernel.lifecycle import Event, Lifecycle
from tests.guests.inside.truth import faults, migrations, switches, usage_ns

from .groups import Groups, wait_stopped

BURN = "while True: pass"


class Kernel:
    """Lifecycle and accounting, loaded for one hierarchy."""

    def __init__(self, hierarchy: str = "unified", counters: list[str] | None = None) -> None:
        number = next(n for n, name in numbers().items() if name == hierarchy)
        self.events: list[Event] = []
        self.lifecycle = Lifecycle(hierarchy, number, self.events.append)
        self.counters = perf.open_on_cpus([perf.SOFTWARE[c] for c in counters or []], online())
        fds = [
            {cpu: fd for (name, cpu), fd in self.counters.descriptors.items() if name == counter}
            for counter in counters or []
        ]
        self.accounting = Accounting(self.lifecycle, fds)
        self.accounting.attach()

    def slot(self, group: Path) -> int:
        slot = self.lifecycle.take()
        self.lifecycle.assign(group.stat().st_ino, slot)
        return slot

    def total(self, slot: int) -> list[int]:
        self.accounting.flush()
        self.lifecycle.slots.settle(self.accounting.in_use())
        return self.lifecycle.slots.total(slot)

    def rest(self, slots: list[int]) -> list[int]:
        """All slots but these: the system's, and those of cgroups that others make meanwhile."""
        rows = [self.lifecycle.row(s) for s in range(kernel.MAX_SLOTS) if s not in slots]
        return [sum(column) for column in zip(*rows, strict=True)]

    def close(self) -> None:
        self.accounting.close()
        self.lifecycle.close()
        self.counters.close()


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


@pytest.fixture
def load() -> Iterator[Callable[..., Kernel]]:
    loaded: list[Kernel] = []

    def make(*args: object, **kwargs: object) -> Kernel:
        loaded.append(Kernel(*args, **kwargs))  # type: ignore[arg-type]
        return loaded[-1]

    yield make
    for one in loaded:
        one.close()


def busy_ns() -> int:
    """User, nice, system, irq and softirq time of all CPUs."""
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return sum(fields[i] for i in (0, 1, 2, 5, 6)) * (10**9 // os.sysconf("SC_CLK_TCK"))


def test_two_busy_loops_are_charged_to_their_own_cgroups(groups: Groups, load: Callable[..., Kernel]) -> None:
    """With cpu-clock in the place of a hardware counter: the same path, on a host without a PMU."""
    one = load(counters=["cpu-clock", "task-clock"])
    paths = [groups.make(name=name) for name in ("a", "b")]
    slots = [one.slot(path) for path in paths]
    for cpu, path in enumerate(paths):
        groups.start(BURN, path, cpus={cpu})
    time.sleep(0.5)
    before, rest_before = [one.total(slot) for slot in slots], one.rest(slots)
    usage, busy = [usage_ns(path) for path in paths], busy_ns()
    time.sleep(10)
    after, rest_after = [one.total(slot) for slot in slots], one.rest(slots)
    usage = [usage_ns(path) - was for path, was in zip(paths, usage, strict=True)]
    busy = busy_ns() - busy
    grown = [[b - a for a, b in zip(was, now, strict=True)] for was, now in zip(before, after, strict=True)]
    rest = [b - a for a, b in zip(rest_before, rest_after, strict=True)]
    for figures, used in zip(grown, usage, strict=True):
        assert figures[kernel.RUN_NS] == pytest.approx(used, rel=0.03)
        value, enabled, running = figures[kernel.COUNTERS : kernel.COUNTERS + 3]
        assert value * enabled / running == pytest.approx(used, rel=0.03)
    assert sum(figures[kernel.RUN_NS] for figures in [*grown, rest]) == pytest.approx(busy, rel=0.03)
    # Both CPUs were busy all the time, so their clocks have no idle time to tell apart.
    assert sum(figures[kernel.COUNTERS] for figures in [*grown, rest]) == pytest.approx(busy, rel=0.03)


def test_idle_time_is_nobodys(groups: Groups, load: Callable[..., Kernel]) -> None:
    one = load()
    path = groups.make()
    slot = one.slot(path)
    groups.start(
        "while True:\n t = time.thread_time()\n while time.thread_time() < t + .003: pass\n time.sleep(.01)",
        path,
        cpus={1},
    )
    time.sleep(0.3)
    before, used = one.total(slot), usage_ns(path)
    time.sleep(3)
    after, used = one.total(slot), usage_ns(path) - used
    assert used > 0.2e9
    assert after[kernel.RUN_NS] - before[kernel.RUN_NS] == pytest.approx(used, rel=0.03)


@pytest.mark.parametrize("hierarchy", [h for h in kernel.HIERARCHIES if Path("/sys/fs/cgroup", h).is_dir()])
def test_every_hierarchy_can_tell_jobs_apart(
    hierarchy: str, groups: Groups, load: Callable[..., Kernel]
) -> None:
    one = load(hierarchy)
    path, other = groups.make(hierarchy), groups.make(hierarchy, "b")
    slot, idle_slot = one.slot(path), one.slot(other)
    process = groups.start(BURN, path)
    time.sleep(0.3)
    before, idle_before = one.total(slot), one.total(idle_slot)
    used = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0])
    time.sleep(1)
    used = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) - used
    assert one.total(slot)[kernel.RUN_NS] - before[kernel.RUN_NS] == pytest.approx(used, rel=0.05)
    assert one.total(idle_slot) == idle_before


WORK = """
os.kill(os.getpid(), signal.SIGSTOP)
{}
os.kill(os.getpid(), signal.SIGSTOP)
"""


def between_stops(
    one: Kernel,
    groups: Groups,
    path: Path,
    work: str,
    read: Callable[[int], int],
    cpus: set[int] | None = None,
) -> tuple[list[int], int]:
    """What the slot of `path` and `read(pid)` grew by while a process did `work`."""
    slot = one.slot(path)
    process = groups.start(WORK.format(work), path, cpus=cpus)
    wait_stopped(process)
    before, was = one.total(slot), read(process.pid)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.05)
    wait_stopped(process)
    grown = [b - a for a, b in zip(before, one.total(slot), strict=True)]
    return grown, read(process.pid) - was


def test_context_switches_are_the_kernels_own(groups: Groups, load: Callable[..., Kernel]) -> None:
    work = "for i in range(1000): time.sleep(0.0005)"
    grown, expected = between_stops(load(), groups, groups.make(), work, switches)
    assert expected >= 1000
    assert grown[kernel.SWITCHES] == expected


def test_page_faults_are_the_kernels_own(groups: Groups, load: Callable[..., Kernel]) -> None:
    work = (
        "import mmap\nm = mmap.mmap(-1, 4096 * 5000)\n"
        "for i in range(5000):\n m[i * 4096] = 1\n if i % 500 == 0: time.sleep(0.001)"
    )
    grown, expected = between_stops(load(), groups, groups.make(), work, faults)
    assert expected >= 4000
    assert grown[kernel.PAGE_FAULTS] == pytest.approx(expected, abs=2)


def test_migrations_are_the_kernels_own(groups: Groups, load: Callable[..., Kernel]) -> None:
    work = "for i in range(200): os.sched_setaffinity(0, {i % 2})"
    grown, expected = between_stops(load(), groups, groups.make(), work, migrations)
    assert expected >= 199
    assert grown[kernel.MIGRATIONS] == expected


@pytest.mark.parametrize(("processes", "cpus"), [(2, {1}), (5, None)], ids=["pinned", "pulled about"])
def test_run_queue_wait_agrees_with_schedstat(
    processes: int, cpus: set[int] | None, groups: Groups, load: Callable[..., Kernel]
) -> None:
    one = load()
    path = groups.make()
    slot = one.slot(path)
    code = "while True:\n t = time.time()\n while time.time() - t < 0.02: pass\n time.sleep(0.002)"
    pids = [groups.start(code, path, cpus=cpus).pid for _ in range(processes)]

    def waited() -> int:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids)

    time.sleep(0.5)
    before, was = one.total(slot), waited()
    time.sleep(4)
    grown, expected = one.total(slot)[kernel.WAIT_NS] - before[kernel.WAIT_NS], waited() - was
    assert expected > 0.5e9
    assert grown == pytest.approx(expected, rel=0.03)


def test_the_wait_of_a_task_that_is_pulled_while_it_waits(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    """Moved from queue to queue, it is booked at each move, where no hook sees it."""
    one = load()
    path, others = groups.make(), groups.make(name="hogs")
    slot = one.slot(path)
    for cpu in (0, 1):
        groups.start(BURN, others, cpus={cpu})
    process = groups.start(BURN, path, cpus={0})

    def waited() -> int:
        return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1])

    time.sleep(0.5)
    before, was = one.total(slot), waited()
    end = time.monotonic() + 4
    while time.monotonic() < end:
        for cpu in (1, 0):
            os.sched_setaffinity(process.pid, {cpu})
            time.sleep(0.0007)
    time.sleep(0.1)  # it has come back to a CPU since
    grown, expected = one.total(slot)[kernel.WAIT_NS] - before[kernel.WAIT_NS], waited() - was
    assert expected > 1e9
    assert grown == pytest.approx(expected, rel=0.03)


def test_a_missed_switch_shifts_no_time_to_another_job(groups: Groups, load: Callable[..., Kernel]) -> None:
    """Some kernels do not show every switch. Here the CPU's row is set as if one had been missed."""
    one = load()
    path = groups.make()
    slot = one.slot(path)
    groups.start(
        "while True:\n t = time.time()\n while time.time() < t + .004: pass\n time.sleep(1e-4)",
        path,
        cpus={1},
    )
    time.sleep(0.3)
    before, used, rest = one.total(slot), usage_ns(path), one.rest([slot])
    for _ in range(40):
        time.sleep(0.05)
        one.accounting.flush()
        struct.pack_into("=QI", one.accounting._states, 256, 1, 0)  # the root cgroup, no job
        struct.pack_into("=I", one.accounting._states, 256 + 16, 4_000_000)  # a task that never came
    grown = [b - a for a, b in zip(before, one.total(slot), strict=True)]
    assert grown[kernel.RUN_NS] == pytest.approx(usage_ns(path) - used, rel=0.05)
    assert grown[kernel.SWITCHES] > 300
    assert one.rest([slot])[kernel.SWITCHES] - rest[kernel.SWITCHES] > 0


def test_a_missed_switch_to_a_task_that_stays_shifts_no_time(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    """As above, but nothing switches before the next flush."""
    one = load()
    path = groups.make()
    slot = one.slot(path)
    groups.start(BURN, path, cpus={1})
    time.sleep(0.3)
    before, used = one.total(slot), usage_ns(path)
    for _ in range(20):
        one.accounting.flush()
        struct.pack_into("=QI", one.accounting._states, 256, 1, 0)
        struct.pack_into("=I", one.accounting._states, 256 + 16, 4_000_000)
        time.sleep(0.05)
    grown = one.total(slot)[kernel.RUN_NS] - before[kernel.RUN_NS]
    assert grown == pytest.approx(usage_ns(path) - used, rel=0.05)


def test_a_running_task_that_is_moved_is_its_new_jobs_from_the_next_flush_on(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    one = load()
    old, new = groups.make(), groups.make(name="b")
    old_slot, new_slot = one.slot(old), one.slot(new)
    process = groups.start(BURN, old, cpus={1})
    time.sleep(0.3)
    moves = one.lifecycle.losses().moves
    (new / "cgroup.procs").write_text(str(process.pid))
    assert one.lifecycle.losses().moves > moves
    one.accounting.flush()
    before, left, used = one.total(new_slot), one.total(old_slot), usage_ns(new)
    for _ in range(10):
        time.sleep(0.1)
        one.accounting.flush()
    grown = one.total(new_slot)[kernel.RUN_NS] - before[kernel.RUN_NS]
    assert grown == pytest.approx(usage_ns(new) - used, rel=0.03)
    assert one.total(old_slot)[kernel.RUN_NS] - left[kernel.RUN_NS] < 0.02e9


def test_threads_are_not_processes(groups: Groups, load: Callable[..., Kernel]) -> None:
    one = load()
    path = groups.make()
    slot = one.slot(path)
    code = (
        "import threading\nfor i in range(20):\n"
        " t = threading.Thread(target=time.sleep, args=(0.01,)); t.start(); t.join()"
    )
    groups.start(code, path).wait()
    total = one.total(slot)
    assert (total[kernel.FORKS], total[kernel.EXITS]) == (0, 1)


def test_a_cgroup_below_one_that_is_not_a_jobs_yet_gets_a_slot_of_its_own(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    one = load()
    groups.make(name="slice/job")
    one.lifecycle.consume()
    above, below = (next(e for e in one.events if e.path.endswith(end)) for end in ("-slice", "/job"))
    assert not below.inherited
    assert above.slot != below.slot


def test_forks_execs_and_exits_are_counted_in_the_kernel(groups: Groups, load: Callable[..., Kernel]) -> None:
    one = load()
    path = groups.make()
    slot = one.slot(path)
    code = "import subprocess\nfor i in range(20): subprocess.run(['/bin/true'])\ninput()"
    process = groups.start(code, path)
    time.sleep(1)
    changes = one.lifecycle.changes(slot)
    total = one.total(slot)
    assert total[kernel.FORKS] == 20
    assert total[kernel.EXECS] == 20
    assert total[kernel.EXITS] == 20
    process.communicate("\n")
    assert one.lifecycle.changes(slot) > changes


def test_a_new_cgroup_is_accounted_before_user_space_has_heard_of_it(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    one = load()
    path = groups.make()
    process = groups.start("t = time.thread_time()\nwhile time.thread_time() - t < 0.3: pass", path)
    process.wait()
    used = usage_ns(path)
    one.accounting.flush()
    one.lifecycle.consume()
    (event,) = [e for e in one.events if e.kind == kernel.CGROUP_MADE and e.path.endswith(path.name)]
    assert event.cgroup == path.stat().st_ino
    assert event.slot > 1
    assert not event.inherited
    # Up to its first switch the process still counted where it came from.
    assert one.lifecycle.slots.total(event.slot)[kernel.RUN_NS] == pytest.approx(used, rel=0.2)


def test_cgroups_below_a_jobs_own_are_the_jobs_at_once(groups: Groups, load: Callable[..., Kernel]) -> None:
    one = load()
    top = groups.make(name="job")
    slot = one.slot(top)
    below = groups.make(name="job/step")
    one.lifecycle.consume()
    event = next(e for e in one.events if e.path.endswith("/step"))
    assert (event.slot, event.inherited) == (slot, True)
    below.rmdir()
    groups.directories.remove(below)
    one.lifecycle.consume()
    assert any(e.kind == kernel.CGROUP_REMOVED and e.path.endswith("/step") for e in one.events)


def test_executions_are_reported_a_few_times_per_job_and_again_for_a_slots_next_owner(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    one = load()
    path = groups.make()
    slot = one.slot(path)
    code = "import subprocess\nfor i in range(30): subprocess.run(['/bin/true'])"
    groups.start(code, path).wait()
    one.lifecycle.consume()
    executed = [e for e in one.events if e.kind == kernel.PROCESS_EXECUTED and e.slot == slot]
    assert len(executed) == kernel.EXECS_REPORTED
    assert all(e.cgroup == path.stat().st_ino for e in executed)
    one.events.clear()
    one.lifecycle.end(slot)
    one.total(0)
    one.lifecycle.forget(path.stat().st_ino)
    while (again := one.lifecycle.take()) != slot:
        pass
    one.lifecycle.assign(path.stat().st_ino, again)
    groups.start(code, path).wait()
    one.lifecycle.consume()
    assert len([e for e in one.events if e.kind == kernel.PROCESS_EXECUTED]) == kernel.EXECS_REPORTED


def test_lost_events_are_counted_exactly(groups: Groups, load: Callable[..., Kernel]) -> None:
    one = load()
    one.lifecycle.consume()
    one.events.clear()
    start = one.lifecycle.losses()
    path = groups.make()
    for i in range(600):
        below = path / str(i)
        below.mkdir()
        below.rmdir()
    losses = one.lifecycle.losses()
    one.lifecycle.consume()
    ours = [e for e in one.events if path.name in e.path]
    assert losses.lost - start.lost > 0
    assert len(one.events) == losses.submitted - start.submitted
    assert len(ours) + (losses.lost - start.lost) >= 1201
    assert len(one.events) + losses.lost - start.lost >= 1201


def test_a_storm_of_cgroups_leaves_no_trace_and_takes_no_slot_for_ever(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    """The ring buffer overflows: what user space does not hear of, nobody could give back."""
    one = load()
    one.lifecycle.consume()
    path = groups.make(name="storm")
    before = one.lifecycle.losses()
    ids = []
    for i in range(700):
        below = path / str(i)
        below.mkdir()
        ids.append(below.stat().st_ino)
        below.rmdir()
    assert one.lifecycle.losses().lost > before.lost
    table = one.lifecycle.maps["slots"]
    assert not [i for i in ids if table.lookup(i.to_bytes(8, "little"), 8) is not None]
    one.lifecycle.consume()
    for event in one.events:
        if event.slot > 1 and not event.inherited:
            one.lifecycle.taken()
            one.lifecycle.merge(event.slot, 0)
    one.total(0)
    one.lifecycle.put_up()
    one.events.clear()
    short = one.lifecycle.losses().slots_short
    groups.make(name="after")
    one.lifecycle.consume()
    (event,) = [e for e in one.events if e.path.endswith("-after")]
    assert event.slot > 1
    assert one.lifecycle.losses().slots_short == short


def test_without_the_hook_cpus_are_charged_to_their_owners(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    one = load(counters=["cpu-clock"])
    path = groups.make()
    slot = one.slot(path)
    one.accounting.detach()
    one.accounting.own({1: slot})
    assert not one.accounting.hooked
    groups.start(BURN, path, cpus={1})
    time.sleep(0.3)
    before, used = one.total(slot), usage_ns(path)
    time.sleep(2)
    grown = [b - a for a, b in zip(before, one.total(slot), strict=True)]
    used = usage_ns(path) - used
    assert grown[kernel.COUNTERS] == pytest.approx(2e9, rel=0.05)  # the whole CPU, its owner's or not
    assert used > 1e9
    assert grown[kernel.RUN_NS] == grown[kernel.WAIT_NS] == grown[kernel.PAGE_FAULTS] == 0
    assert grown[kernel.SWITCHES] > 0
    one.accounting.attach()
    again, used = one.total(slot), usage_ns(path)
    time.sleep(1)
    grown = [b - a for a, b in zip(again, one.total(slot), strict=True)]
    assert grown[kernel.RUN_NS] == pytest.approx(usage_ns(path) - used, rel=0.03)
    assert grown[kernel.PAGE_FAULTS] < 100  # nobody's past is booked


def test_what_a_dead_event_counted_last_is_booked_once_and_the_next_begins_at_0(
    groups: Groups, load: Callable[..., Kernel]
) -> None:
    one = load(counters=["page-faults"])
    path = groups.make()
    slot, at = one.slot(path), kernel.COUNTERS
    one.accounting.detach()
    one.accounting.own({1: slot})  # nothing is charged between flushes

    def touch() -> int:
        """Fresh pages on CPU 1; what its event stands at then."""
        code = "import mmap\nm = mmap.mmap(-1, 4096 * 3000)\nfor i in range(3000): m[i * 4096] = 1"
        groups.start(code, path, cpus={1}).wait()
        return perf.read_counter(one.counters.descriptors["page-faults", 1]).value

    touch()
    before = one.total(slot)[at]
    assert before >= 3000
    touch()
    last = perf.read_counter(one.counters.descriptors["page-faults", 1])
    one.accounting.end_events(1, {0: last})
    booked = one.lifecycle.slots.total(slot)[at]
    assert 3000 <= booked - before <= last.value - 3000
    assert one.total(slot)[at] == booked  # the event itself is read no more
    (cpu,) = one.counters.update(online(), dead={1})
    one.accounting.set_event(0, cpu, one.counters.descriptors["page-faults", cpu])
    newest = touch()
    assert 3000 <= one.total(slot)[at] - booked < newest + 1000
    assert one.accounting.read_errors() == 0


def test_nothing_is_left_in_the_kernel_after_kill_9() -> None:
    code = (
        "from tests.kernel.test_accounting import Kernel\nk = Kernel()\n"
        "print(*k.lifecycle.programs, *k.accounting.programs, flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        names = {name[:15] for name in process.stdout.readline().split()}
        assert "on_switch" in names
        mine = programs_of(process.pid)
        assert names == {name for number, name in programs() if number in mine}
        process.kill()
    wait_until_gone(mine)


def programs() -> set[tuple[int, str]]:
    """(id, name) of the BPF programs in the kernel."""
    import json

    shown = subprocess.run(["bpftool", "-j", "prog", "show"], capture_output=True, check=True)
    return {(p["id"], p.get("name", "")[:15]) for p in json.loads(shown.stdout)}


def programs_of(pid: int) -> set[int]:
    """Ids of the BPF programs that a process holds."""
    found = set()
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(OSError):
            found |= {
                int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("prog_id:")
            }
    return found


def wait_until_gone(numbers: set[int], seconds: float = 10) -> None:
    """Until none of these programs is in the kernel; the kernel frees them a moment later."""
    deadline = time.monotonic() + seconds
    while left := {number for number, _ in programs()} & numbers:
        assert time.monotonic() < deadline, f"still in the kernel: {left}"
        time.sleep(0.1)
