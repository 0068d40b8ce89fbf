"""Source "cgroup": what the kernel already counts for each job, from the job's cgroup files.

CPU time, memory, I/O, throttling and pressure of v2, v1 and hybrid hosts. Where both worlds have a
figure, v2's is taken. Files that move all the time are read every tick through descriptors that stay
open, one system call each; those that change seldom or make the kernel work (memory.stat, peak,
pressure, OOM kills) every `SLOW_S` seconds, limits every `LIMITS_S`, spread over the jobs so that ticks
are even; they are carried along in between.

A reason in `JobSample.unavailable` stands for a group of figures: `cpu`, `memory`, `io`, `throttling`,
`pressure`, or `cgroup` for all of them.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.sources import cgroup_files as parse
from expanse_ebpf.sources.block_devices import Devices
from expanse_ebpf.sources.cgroup_limits import Limits, cfs_quota, contents, cpu_max, memory_max
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JobSample

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.wire.collector_pb2 import Report

SLOW_S = 5.0
LIMITS_S = 20.0
# By how much the scheduler hook may differ from a CPU cgroup that had the job all the time: by when the two
# are read, and in proportion, by what each counts of a switch.
_LATE_NS, _LATE_PART = 1_000_000_000, 32
_REOPEN_EVERY = 12  # slow turns after which files that were missing are looked for again
_READ = 16384
_DESCRIPTORS = 65536
_SLOW_GAUGES = ("memory_anon_bytes", "memory_file_bytes", "memory_limit_bytes", "cpu_limit_cores")
GAUGES = frozenset(("memory_bytes", *_SLOW_GAUGES))


class Form(NamedTuple):
    """One file of one hierarchy, and the fields of JobSample that its parser gives."""

    group: str
    hierarchy: str
    file: str
    fields: tuple[str, ...]
    parse: Callable[[bytes], parse.Figures]


_CPU = ("cpu_ns", "cpu_user_ns", "cpu_system_ns")
_THROTTLING = ("throttled_ns", "throttled_periods")
_IO = ("io_read_bytes", "io_write_bytes", "io_read_ops", "io_write_ops")
_STAT = ("memory_anon_bytes", "memory_file_bytes")


def _fast(stacked: parse.Stacked) -> tuple[Form, ...]:
    """Files read every tick; of two that give the same field, the first that has it counts."""
    v2_io, v1_io = partial(parse.io_stat, stacked=stacked), partial(parse.blkio, stacked=stacked)
    return (
        Form("cpu", "unified", "cpu.stat", (*_CPU, *_THROTTLING), parse.cpu_stat),
        Form("cpu", "cpuacct", "cpuacct.usage", _CPU[:1], parse.one),
        Form("cpu", "cpuacct", "cpuacct.stat", _CPU[1:], parse.cpuacct_stat),
        Form("throttling", "cpu", "cpu.stat", _THROTTLING, parse.throttling),
        Form("memory", "unified", "memory.current", ("memory_bytes",), parse.one),
        Form("memory", "memory", "memory.usage_in_bytes", ("memory_bytes",), parse.one),
        Form("io", "unified", "io.stat", _IO, v2_io),
        Form("io", "blkio", "blkio.throttle.io_service_bytes_recursive", _IO[:2], v1_io),
        Form("io", "blkio", "blkio.throttle.io_serviced_recursive", _IO[2:], v1_io),
        Form("io", "blkio", "blkio.throttle.io_service_bytes", _IO[:2], v1_io),
        Form("io", "blkio", "blkio.throttle.io_serviced", _IO[2:], v1_io),
    )


_SLOW = (
    Form("memory", "unified", "memory.peak", ("memory_peak_bytes",), parse.one),
    Form("memory", "memory", "memory.max_usage_in_bytes", ("memory_peak_bytes",), parse.one),
    Form("memory", "unified", "memory.stat", _STAT, parse.memory_stat),
    Form("memory", "memory", "memory.stat", (*_STAT, "memory_limit_bytes"), parse.memory_stat_v1),
    Form("memory", "unified", "memory.events", ("oom_kills",), parse.oom_kills),
    Form(
        "pressure",
        "unified",
        "cpu.pressure",
        ("cpu_pressure.some_us", "cpu_pressure.full_us"),
        parse.pressure,
    ),
    Form(
        "pressure",
        "unified",
        "memory.pressure",
        ("memory_pressure.some_us", "memory_pressure.full_us"),
        parse.pressure,
    ),
    Form(
        "pressure", "unified", "io.pressure", ("io_pressure.some_us", "io_pressure.full_us"), parse.pressure
    ),
)
# Group, the field that tells whether it is known, the hierarchies that can have it, what is wanted there.
_GROUPS = (
    ("cpu", "cpu_ns", ("unified", "cpuacct"), "CPU time"),
    ("memory", "memory_bytes", ("unified", "memory"), "memory figures"),
    ("io", "io_read_bytes", ("unified", "blkio"), "I/O counters"),
    ("throttling", "throttled_periods", ("unified", "cpu"), "throttling counters"),
    ("pressure", "cpu_pressure", ("unified",), "pressure figures"),
)
# What v2 has only where the controller is on.
_CONTROLLERS = {"memory": b"memory", "io": b"io", "throttling": b"cpu"}
_HIERARCHIES = frozenset(name for group in _GROUPS for name in group[2])


def create(context: Context) -> CgroupSource:
    """The source as the configuration wants it."""
    return CgroupSource(context.config.agent.interval_s)


class CgroupSource:
    """Reads the cgroup files of every job."""

    name = "cgroup"

    def __init__(self, interval_s: float = 1.0) -> None:
        self.unavailable: dict[str, str] = {}
        self._slow_every = max(1, round(SLOW_S / interval_s))
        self._tick = 0
        self._seen = 0
        self._jobs: dict[Job, _Files] = {}
        self._fast = _fast(Devices().stacked)
        self._limits = Limits(max(1, round(LIMITS_S / interval_s)))

    def start(self) -> None:
        """Allow as many descriptors as the node's jobs need."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in each job's figures; a job whose cgroup vanished keeps the counters last read."""
        self._limits.tick = self._tick
        turn = self._tick % self._slow_every
        for job, sample in jobs:
            files = self._jobs.get(job)
            new = False
            if files is None:
                turns, slot = divmod(self._seen, self._slow_every)
                files = self._jobs[job] = _Files(slot, turns)
                self._seen += 1
                new = True
            new = files.open(job.directories, self._fast) or new
            lost = files.read()
            if new or lost or turn == files.slot or job.state == JOB_STATE_ENDED:
                files.read_slow(self._limits, self._fast)
            files.fill(sample)
        if len(self._jobs) > len(jobs):
            for gone in self._jobs.keys() - {job for job, _ in jobs}:
                self._jobs.pop(gone).close()
        self._limits.prune(len(jobs))
        self._tick += 1
        if any(files.starved for files in self._jobs.values()):
            self.unavailable["files"] = "too many open files; raise the agent's limit (LimitNOFILE=65536)"
        else:
            self.unavailable.pop("files", None)

    def stop(self) -> None:
        """Close every descriptor."""
        while self._jobs:
            self._jobs.popitem()[1].close()


class _Open:
    """A file that is read every tick: its descriptor, what is taken from it and what it held last."""

    __slots__ = ("data", "fd", "fields", "form")

    def __init__(self, form: Form, fields: tuple[str, ...], fd: int) -> None:
        self.form = form
        self.fields = fields  # "" for one that another file gives already
        self.fd = fd
        self.data = b"\0"  # differs from anything read


class _Files:
    """One job's files and figures."""

    __slots__ = (
        "_before_ns",
        "_directories",
        "_figures",
        "_hooked_ns",
        "_left",
        "_oom",
        "_oom_gone",
        "_open",
        "_rising",
        "_slow",
        "_turns",
        "slot",
        "starved",
    )

    def __init__(self, slot: int, turns: int) -> None:
        self.slot = slot  # the tick, of every `slow_every`, in which the slow files are read
        self.starved = False  # whether the agent ran out of descriptors
        self._directories: dict[str, str] = {}
        self._open: list[_Open] = []
        self._slow: list[Form] = []
        self._figures = JobSample()  # the figures known now, merged into the sample of each tick
        self._rising: dict[str, parse.Rising] = {}
        self._hooked_ns = 0  # CPU time by the scheduler hook, as long as that is all there is
        self._before_ns = 0  # and how much of it was spent outside of its CPU cgroup
        self._left = False  # found to have run elsewhere than in its CPU cgroup; for good
        self._oom: dict[str, int] = {}
        self._oom_gone = 0
        self._turns = turns  # slow turns; differs from job to job, so that not all reopen at once

    def open(self, directories: dict[str, str], fast: Sequence[Form]) -> bool:
        """Open what the job has in `directories`, when they changed; figures reached so far stay."""
        if directories == self._directories:
            return False
        self._directories = dict(directories)
        self._reopen(fast)
        return True

    def _reopen(self, fast: Sequence[Form]) -> None:
        self.close()
        self.starved = False
        supplied: set[str] = set()
        for form in fast:
            directory = self._directories.get(form.hierarchy)
            if directory is None or supplied.issuperset(form.fields):
                continue
            try:
                fd = os.open(f"{directory}/{form.file}", os.O_RDONLY | os.O_CLOEXEC)
            except (OSError, ValueError) as error:  # ValueError: a NUL in the path
                self.starved |= isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
                continue
            found = _given(form, fd) - supplied
            if found:
                supplied |= found
                self._open.append(_Open(form, tuple(n if n in found else "" for n in form.fields), fd))
            else:
                os.close(fd)
        self._slow = [form for form in _SLOW if form.hierarchy in self._directories]

    def read(self) -> bool:
        """Read the files of every tick; True when one of them was lost."""
        lost = False
        for file in self._open:
            try:
                data = os.pread(file.fd, _READ, 0)
            except OSError:  # ENODEV: the cgroup was removed or its controller switched off
                os.close(file.fd)
                file.fd = -1
                lost = True
                self._take(file.fields, (None,) * len(file.fields))
                continue
            if data != file.data:
                file.data = data
                self._take(file.fields, file.form.parse(data))
        if lost:
            self._open = [file for file in self._open if file.fd >= 0]
        return lost

    def _take(self, fields: tuple[str, ...], values: parse.Figures) -> None:
        """Keep `values`; a gauge without one goes, a counter without one stays where it was."""
        for name, value in zip(fields, values, strict=True):
            if name in GAUGES:
                if value is None:
                    self._figures.ClearField(name)
                else:
                    setattr(self._figures, name, value)
            elif name and isinstance(value, int):
                rising = self._rising.get(name)
                if rising is None:
                    rising = self._rising[name] = parse.Rising()
                message, dot, part = name.partition(".")
                if dot:
                    setattr(getattr(self._figures, message), part, rising.feed(value))
                else:
                    setattr(self._figures, name, rising.feed(value))

    def read_slow(self, limits: Limits, fast: Sequence[Form]) -> None:
        """Read the files of every few seconds."""
        self._turns += 1
        if self._turns % _REOPEN_EVERY == 0 and self._figures.unavailable:
            self._reopen(fast)
            self.read()
        self._take(_SLOW_GAUGES, (None,) * len(_SLOW_GAUGES))
        supplied: set[str] = set()
        useful = []  # files that are missing are left alone until everything is opened anew
        for form in self._slow:
            if supplied.issuperset(form.fields):
                continue
            data = contents(f"{self._directories[form.hierarchy]}/{form.file}")
            if data is not None:
                useful.append(form)
                self._take(tuple("" if n in supplied else n for n in form.fields), form.parse(data))
                supplied.update(form.fields)
        self._slow = useful
        unified, cpu, memory = (self._directories.get(name) for name in ("unified", "cpu", "memory"))
        if unified and (limit := limits.tightest(unified, memory_max)) is not None:
            self._figures.memory_limit_bytes = int(limit)
        cores = [limits.tightest(unified, cpu_max) if unified else None]
        cores.append(limits.tightest(cpu, cfs_quota) if cpu else None)
        if cpu_limits := [limit for limit in cores if limit is not None]:
            self._figures.cpu_limit_cores = min(cpu_limits)
        if memory and "oom_kills" not in supplied:
            self._read_v1_oom(memory)
        self._explain()

    def _read_v1_oom(self, directory: str) -> None:
        # v1 counts a kill in the victim's own cgroup only, which is a step or a container below the
        # job's; one that is removed before it is read takes its count along.
        now: dict[str, int] = {}
        for path in _tree(directory, 64):
            kills = parse.oom_kills(contents(f"{path}/memory.oom_control") or b"")[0]
            if isinstance(kills, int):
                now[path] = kills
        self._oom_gone += sum(kills for path, kills in self._oom.items() if path not in now)
        self._oom = now
        if now:
            self._take(("oom_kills",), (self._oom_gone + sum(now.values()),))

    def _explain(self) -> None:
        """Bring the reasons for what is missing up to date."""
        figures, reasons = self._figures, self._figures.unavailable
        reasons.clear()
        if not self._directories.keys() & _HIERARCHIES:
            reasons["cgroup"] = "no cgroup of its own in a hierarchy with figures"
            return
        for group, known, hierarchies, wanted in _GROUPS:
            if figures.HasField(known):
                continue
            own = [self._directories[name] for name in hierarchies if name in self._directories]
            if not own:
                reasons[group] = f"no {hierarchies[-1]} cgroup of its own"
                if group == "pressure":
                    reasons[group] += ", and v1 has no pressure figures"
            elif not any(os.path.isdir(directory) for directory in own):  # noqa: PTH112
                reasons[group] = "its cgroup is gone"
            elif group == "pressure" and not os.path.exists("/proc/pressure"):  # noqa: PTH110
                reasons[group] = "the kernel's pressure accounting is off; boot with psi=1"
            elif group == "io" and "blkio" in self._directories:
                reasons[group] = "none counted: on v1 many kernels do so for devices with a limit only"
            elif (controller := _CONTROLLERS.get(group)) and _switched_off(own, controller):
                reasons[group] = f"the {controller.decode()} controller is not on in its cgroup"
            else:
                reasons[group] = f"its cgroup has no {wanted}"

    def fill(self, sample: JobSample) -> None:
        """Write the figures and the reasons into `sample`."""
        hooked = sample.cpu_ns  # the source "cpu" came before; 0 where it does not count
        sample.MergeFrom(self._figures)
        if not self._figures.HasField("cpu_ns"):
            self._hooked_ns = hooked or self._hooked_ns
            return
        if self._hooked_ns:
            self._before_ns = max(0, self._hooked_ns - sample.cpu_ns)
            self._hooked_ns = 0
        # Systemd on v1 makes a unit's CPU cgroup when some unit beside it needs one, and moves processes
        # out of cgroups that others made. What a job has used elsewhere is only ever added to.
        sample.cpu_ns += self._before_ns
        ahead = hooked - sample.cpu_ns
        if "unified" not in self._directories:
            self._left |= ahead > _LATE_NS + sample.cpu_ns // _LATE_PART
        if self._left and ahead > 0:
            self._before_ns += ahead
            sample.cpu_ns = hooked
        if self._left or self._before_ns > _LATE_NS:
            sample.ClearField("cpu_user_ns")
            sample.ClearField("cpu_system_ns")
            sample.unavailable["cpu"] = "it was not in its CPU cgroup all the time; the scheduler hook knows"

    def close(self) -> None:
        """Close the descriptors."""
        while self._open:
            file = self._open.pop()
            if file.fd >= 0:
                os.close(file.fd)


def _switched_off(directories: Sequence[str], controller: bytes) -> bool:
    """Whether these are v2 cgroups alone, without the controller."""
    on = [contents(f"{directory}/cgroup.controllers") for directory in directories]
    return all(names is not None and controller not in names.split() for names in on)


def _given(form: Form, fd: int) -> set[str]:
    """The fields that the file really has; none when it cannot be read.

    Files of I/O name a device only once it was used, so they have what they can have.
    """
    try:
        values = form.parse(os.pread(fd, _READ, 0))
    except OSError:
        return set()
    return {
        name
        for name, value in zip(form.fields, values, strict=True)
        if value is not None or form.group == "io"
    }


def _tree(directory: str, most: int) -> list[str]:
    """`directory` and the directories below it, at most `most`."""
    found = [directory]
    for path in found:
        try:
            # A cgroup's link count is 2 and one for each cgroup below it, which saves the listing.
            if os.stat(path).st_nlink <= 2:  # noqa: PTH116
                continue
            with os.scandir(path) as entries:
                for entry in entries:
                    if len(found) >= most:
                        return found
                    if entry.is_dir(follow_symlinks=False):
                        found.append(entry.path)
        except (OSError, ValueError):
            continue
    return found
