"""The jobs that live on this node, kept by lifecycle events.

The cgroup tree is walked at the start, and again only when the kernel side says that events were
lost. From then on a job begins with its cgroup's making and ends when its last process is gone or its
cgroup is removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs import hierarchies, paths, states
from expanse_ebpf.jobs.hierarchies import Hierarchy, Tally
from expanse_ebpf.jobs.identity import IdentityReader, parse_stat, parse_uid
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.jobs.paths import Place, UnitFilter
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JOB_STATE_STARTING

_START_TICKS = 60  # a cgroup without any process for so long is taken for left over
_IDENTITY_TRIES = 10
_SETTLING = 4  # first looks at a job: its processes may still be on their way to their user
_MAX_ELSEWHERE = 16384


class Accounts(Protocol):
    """The kernel's accounting slots, as far as the table decides about them."""

    def take(self) -> int:
        """A free slot; raises UnavailableError."""

    def taken(self) -> None:
        """The kernel has given a slot itself."""

    def assign(self, cgroup: int, slot: int) -> None:
        """Account `cgroup` in `slot`."""

    def forget(self, cgroup: int) -> None:
        """`cgroup` is gone or no job's."""

    def merge(self, slot: int, heir: int) -> None:
        """`slot` was not needed: what it has run up goes to `heir`."""

    def end(self, slot: int) -> None:
        """The job of `slot` has had its last record."""

    def changes(self, slot: int) -> int:
        """Grows whenever the slot's processes may have changed."""

    def moves(self) -> int:
        """Grows whenever a process was moved between cgroups."""


class _NoAccounts:
    """Without BPF: no slots, and everything may always have changed."""

    def take(self) -> int:
        raise UnavailableError("the BPF programs are not loaded")

    def taken(self) -> None: ...

    def assign(self, cgroup: int, slot: int) -> None: ...

    def forget(self, cgroup: int) -> None: ...

    def merge(self, slot: int, heir: int) -> None: ...

    def end(self, slot: int) -> None: ...

    def changes(self, slot: int) -> int:
        return 0

    def moves(self) -> int:
        self._moves = getattr(self, "_moves", 0) + 1
        return self._moves


class _Entry:
    """What the table knows of a live job besides the job itself."""

    __slots__ = (
        "cgroups",
        "changes",
        "dormant",
        "had_processes",
        "looks",
        "path",
        "place",
        "roles",
        "tries",
        "waited",
    )

    def __init__(self, path: str, place: Place, dormant: bool) -> None:
        self.path = path
        self.place = place
        self.cgroups: dict[str, tuple[int, Place]] = {}  # path to (cgroup id, place), the job's own included
        self.roles: dict[int, states.Role] = {}
        self.changes = -1
        self.looks = 2  # how often to look at the processes before trusting the change counts
        self.had_processes = False
        self.dormant = dormant  # its cgroup is there, but it has had its last record
        self.tries = 0
        self.waited = 0


class JobTable:
    """All live jobs; fed by made(), removed() and executed(), brought up to date by update()."""

    def __init__(
        self,
        mounted: Sequence[Hierarchy],
        identities: IdentityReader,
        units: UnitFilter,
        proc: str = "/proc",
    ) -> None:
        self._hierarchies = {h.name: h for h in mounted}
        # v2 files lie in one directory, whichever controllers it has.
        self._controllers = {h.name: h for h in mounted}
        self._controllers |= {name: h for h in mounted if h.version == 1 for name in h.controllers}
        self._identities = identities
        self._units = units
        self._proc = proc
        self._accounts: Accounts = _NoAccounts()
        self._telling = ""
        self._entries: dict[Job, _Entry] = {}
        self._by_path: dict[str, Job] = {}  # of the job's own cgroup, in the telling hierarchy
        self._by_cgroup: dict[str, Job] = {}  # of every cgroup of a job, there
        # Job directories seen in each other hierarchy: path to (scheduler, id).
        self._elsewhere: dict[str, dict[str, tuple[str, str]]] = {}
        self._unattributed: set[str] = set()
        self._moves = -1
        self._unmatched_ticks = 0
        self._unmatched: set[tuple[str, str]] = set()  # seen in another hierarchy alone
        self._had_jobs = False  # whether a scheduler's job has been seen in the present one

    # ---- which hierarchy -----------------------------------------------------------------------

    def survey(self) -> str:
        """Look for jobs in all hierarchies; the name of the one that tells most of them apart."""
        counts = {}
        for name, hierarchy in self._hierarchies.items():
            seen = self._elsewhere[name] = {}
            for path, _ in self._walk(hierarchy):
                self._see_elsewhere(seen, path)
            counts[name] = self._lively(name)
        return hierarchies.choose(counts, list(self._hierarchies.values()))

    def better_hierarchy(self) -> str | None:
        """Another hierarchy that tells more jobs apart than the present one, when that lasts; else None."""
        here = _tally(job.identity.scheduler for job in self)
        self._had_jobs |= here.jobs > 0
        known = {(job.identity.scheduler, entry.place.id) for job, entry in self._entries.items()}
        unmatched = {key for seen in self._elsewhere.values() for key in seen.values() if key not in known}
        self._unmatched_ticks = self._unmatched_ticks + 1 if unmatched and unmatched <= self._unmatched else 0
        self._unmatched = unmatched
        # Rarely after the first time: what stays unmatched may be left over from former jobs.
        if self._unmatched_ticks != 2 and (self._unmatched_ticks == 0 or self._unmatched_ticks % 30):
            return None
        tallies = {name: self._lively(name) for name in self._elsewhere}
        tallies[self._telling] = here
        chosen = hierarchies.choose(tallies, list(self._hierarchies.values()))
        # Not back and forth with every job: units alone are no reason where jobs have been seen.
        more = tallies[chosen].jobs > here.jobs if self._had_jobs else tallies[chosen] > here
        return chosen if more else None

    def _lively(self, name: str) -> Tally:
        """How many of the jobs seen in another hierarchy have a process there."""
        hierarchy = self._hierarchies[name]
        lively = set()
        for path, key in self._elsewhere.get(name, {}).items():
            directory = hierarchy.directory(path)
            if directory is not None and any(_pids(folder) for folder, _, _ in os.walk(directory)):
                lively.add(key)
        return _tally(scheduler for scheduler, _ in lively)

    def begin(self, telling: str, accounts: Accounts | None) -> None:
        """(Re)start with jobs told apart in `telling`; jobs that are known keep their identity."""
        self._telling = telling
        self._had_jobs = False
        self._accounts = accounts or _NoAccounts()
        self._by_path.clear()
        self._by_cgroup.clear()
        former = {entry.path: (job, entry) for job, entry in self._entries.items()}
        self._entries.clear()
        self.survey()
        self._elsewhere.pop(telling, None)
        for path, cgroup in self._walk(self._hierarchies[telling]):
            self.made(telling, path, cgroup, 0, inherited=False, found=True)
        for path, (old, entry) in former.items():
            new = self._by_path.get(path)
            if new is not None:
                new.identity.CopyFrom(old.identity)
                self._entries[new].tries = entry.tries
                self._entries[new].dormant = entry.dormant

    def resync(self) -> None:
        """Events were lost: compare with the tree."""
        present = dict(self._walk(self._hierarchies[self._telling]))
        for path in [p for p in self._by_cgroup if p not in present]:
            self.removed(self._telling, path)
        for path, cgroup in present.items():
            known = self._by_cgroup.get(path)
            if known is None or self._entries[known].cgroups[path][0] != cgroup:
                self.made(self._telling, path, cgroup, 0, inherited=False)
        for name, hierarchy in self._hierarchies.items():
            if name != self._telling:
                seen = {path for path, _ in self._walk(hierarchy)}
                for path in [p for p in self._elsewhere.get(name, {}) if p not in seen]:
                    self.removed(name, path)
                for path in seen:
                    self.made(name, path, 0, 0, inherited=False)

    @staticmethod
    def _walk(hierarchy: Hierarchy) -> Iterator[tuple[str, int]]:
        """(path, cgroup id) of every cgroup, parents first."""
        pending = [hierarchy.mount]
        while pending:
            directory = pending.pop()
            try:
                with os.scandir(directory) as entries:
                    below = [e for e in entries if e.is_dir(follow_symlinks=False)]
            except OSError:
                continue  # gone in the meantime
            for entry in below:
                pending.append(entry.path)
                path = hierarchy.path(entry.path)
                if path is not None:
                    yield path, entry.inode()

    # ---- events --------------------------------------------------------------------------------

    def made(
        self, hierarchy: str, path: str, cgroup: int, slot: int, *, inherited: bool, found: bool = False
    ) -> Job | None:
        """A cgroup was made (or `found` by walking); the job when it is a new one.

        `slot` is what the kernel gave it; 0: none.
        """
        if hierarchy != self._telling:
            seen = self._elsewhere.setdefault(hierarchy, {})
            if len(seen) < _MAX_ELSEWHERE:
                self._see_elsewhere(seen, path)
            self._add_directory(hierarchy, path)
            return None
        known = self._by_cgroup.get(path)
        if known is not None and self._entries[known].cgroups[path][0] != cgroup:
            self.removed(hierarchy, path)  # unheard of: that event was lost
        given = slot if slot > 1 and not inherited else None  # a slot of its own
        if given is not None:
            self._accounts.taken()
        place = paths.parse(path, self._units)
        new = None
        job = None
        if isinstance(place, Place):
            own = _prefix(path, place.depth)
            job = self._by_path.get(own)
            if job is None:
                job = new = self._new_job(own, place, cgroup if own == path else None, given, found)
        else:
            job = self._above(path)  # whatever lies below a job's cgroup is the job's
            if job is None and place is None:
                self._unattributed.add(path)
        if job is None:
            if given is not None:
                self._accounts.forget(cgroup)
                self._accounts.merge(given, 0)
            elif inherited or slot:
                self._accounts.forget(cgroup)
            return None
        entry = self._entries[job]
        entry.cgroups[path] = (cgroup, place if isinstance(place, Place) else entry.place)
        entry.changes = -1
        self._by_cgroup[path] = job
        if job.slot is not None:
            self._accounts.assign(cgroup, job.slot)
            if given is not None and given != job.slot:
                self._accounts.merge(given, job.slot)
        if isinstance(place, Place) and place.container and place.container not in job.identity.containers:
            job.identity.containers.append(place.container)
        return new

    def removed(self, hierarchy: str, path: str, cgroup: int | None = None) -> None:
        """A cgroup was removed; with its id, only if it is still the one that is known at this path."""
        if hierarchy != self._telling:
            self._elsewhere.get(hierarchy, {}).pop(path, None)
            return
        self._unattributed.discard(path)
        job = self._by_cgroup.get(path)
        if job is None:
            return
        entry = self._entries[job]
        if cgroup is not None and entry.cgroups[path][0] != cgroup:
            return
        del self._by_cgroup[path]
        self._accounts.forget(entry.cgroups.pop(path)[0])
        entry.changes = -1
        if path == entry.path:
            del self._by_path[path]
            job.state = JOB_STATE_ENDED
            job.pids = frozenset()

    def executed(self, cgroup: int, pid: int) -> None:
        """A process of a job has executed a program: the moment at which a short job can be identified."""
        for job, entry in self._entries.items():
            if any(known == cgroup for known, _ in entry.cgroups.values()):
                entry.changes = -1
                entry.roles.pop(pid, None)  # a container's runtime becomes its pause process that way
                if entry.tries < _IDENTITY_TRIES and not self._identities.complete(job.identity):
                    self._identify(job, entry, [pid])
                return

    # ---- once a tick ----------------------------------------------------------------------------

    def update(self) -> list[Job]:
        """Look at what has changed; all jobs to report now, those that have just ended included.

        After the report, call finish().
        """
        moves = self._accounts.moves()
        moved, self._moves = moves != self._moves, moves
        for job, entry in self._entries.items():
            if job.state == JOB_STATE_ENDED and (not entry.dormant or self._gone(job, entry)):
                continue
            changes = self._accounts.changes(job.slot) if job.slot is not None else -1
            if moved or changes != entry.changes or changes == -1:
                # A process that exits is still listed for a moment, hence one look more.
                entry.looks, entry.changes = 2, changes
            if entry.looks:
                entry.looks -= 1
                self._look(job, entry)
        return [job for job, entry in self._entries.items() if not entry.dormant]

    def finish(self) -> None:
        """The report is made: jobs that have ended are let go."""
        for job, entry in list(self._entries.items()):
            if job.state != JOB_STATE_ENDED:
                continue
            entry.dormant = True
            if self._gone(job, entry):
                del self._entries[job]
                if job.slot is not None:
                    self._accounts.end(job.slot)

    @property
    def left_over(self) -> list[Job]:
        """Jobs that are over and whose cgroups are still there."""
        return [j for j, entry in self._entries.items() if entry.dormant and j.state == JOB_STATE_ENDED]

    @property
    def unattributed(self) -> int:
        """Cgroups of a form that nobody knows."""
        return len(self._unattributed)

    def __iter__(self) -> Iterator[Job]:
        return (job for job, entry in self._entries.items() if not entry.dormant)

    # ---- inside ---------------------------------------------------------------------------------

    def _gone(self, job: Job, entry: _Entry) -> bool:
        """Whether the job's own cgroup has been removed; another may be in its place."""
        return self._by_path.get(entry.path) is not job

    def _new_job(self, own: str, place: Place, cgroup: int | None, given: int | None, found: bool) -> Job:
        hierarchy = self._hierarchies[self._telling]
        directory = hierarchy.directory(own) or hierarchy.mount
        if cgroup is None:  # its own cgroup was made before that could be seen
            try:
                cgroup = Path(directory).stat().st_ino
            except OSError:
                cgroup = 0
        job = Job(self._identities.identify(place, own, cgroup, directory, ()))
        entry = _Entry(own, place, dormant=found)
        self._entries[job] = entry
        self._by_path[own] = job
        if given is not None:
            job.slot = given
        else:
            try:
                job.slot = self._accounts.take()
            except UnavailableError:
                job.slot = None
        self._set_directory(job, self._telling, own)
        for name, seen in self._elsewhere.items():
            if own in seen:
                self._set_directory(job, name, own)
            else:  # a user's job lies below wherever the user is in each hierarchy
                alike = [path for path, key in seen.items() if key == (place.scheduler, place.id)]
                if len(alike) == 1:
                    self._set_directory(job, name, alike[0])
        return job

    def _add_directory(self, hierarchy: str, path: str) -> None:
        job = self._by_path.get(path)
        key = self._elsewhere[hierarchy].get(path)
        if job is None and key is not None:
            alike = [j for j in self._by_path.values() if (j.identity.scheduler, j.identity.id) == key]
            job = alike[0] if len(alike) == 1 else None
        if job is not None:
            self._set_directory(job, hierarchy, path)

    def _set_directory(self, job: Job, hierarchy: str, path: str) -> None:
        found_at = self._hierarchies[hierarchy].directory(path)
        if found_at is not None:
            for name, controller in self._controllers.items():
                if controller.name == hierarchy:
                    job.directories[name] = found_at

    def _see_elsewhere(self, seen: dict[str, tuple[str, str]], path: str) -> None:
        place = paths.parse(path, self._units)
        if isinstance(place, Place) and _prefix(path, place.depth) == path:
            seen[path] = (place.scheduler, place.id)

    def _above(self, path: str) -> Job | None:
        while len(path) > 1:
            job = self._by_cgroup.get(path)
            if job is not None:
                return job
            path = path.rpartition("/")[0]
        return None

    def _look(self, job: Job, entry: _Entry) -> None:
        roles: dict[int, states.Role] = {}
        hierarchy = self._hierarchies[self._telling]
        for path, (_, place) in entry.cgroups.items():
            directory = hierarchy.directory(path)
            for pid in _pids(directory) if directory else ():
                known = entry.roles.get(pid)
                # A slurmstepd becomes a user's process by executing it, so "user" stands until then.
                roles[pid] = known if known == "user" else self._role(pid, place)
        entry.roles = roles
        job.pids = states.user_pids(roles)
        entry.had_processes |= bool(roles)
        if job.state == JOB_STATE_STARTING:
            entry.waited += 1
        before = job.state
        job.state = states.decide(
            job.identity.scheduler,
            roles,
            had_processes=entry.had_processes or entry.waited > _START_TICKS,
            populated=_populated(hierarchy.directory(entry.path)),
        )
        if job.state not in (JOB_STATE_ENDED, JOB_STATE_STARTING):
            entry.dormant = False
        elif before == JOB_STATE_STARTING and job.state == JOB_STATE_STARTING:
            entry.looks = max(entry.looks, 1)
        incomplete = entry.tries < _IDENTITY_TRIES and not self._identities.complete(job.identity)
        if roles and (incomplete or entry.tries < _SETTLING):
            self._identify(job, entry, sorted(roles))
            if entry.tries < _SETTLING:
                entry.looks = max(entry.looks, 1)

    def _identify(self, job: Job, entry: _Entry, pids: Sequence[int]) -> None:
        entry.tries += 1
        directory = self._hierarchies[self._telling].directory(entry.path)
        if directory is None:
            return
        identity = self._identities.identify(entry.place, entry.path, job.identity.run, directory, pids)
        for container in job.identity.containers:
            if container not in identity.containers:
                identity.containers.append(container)
        job.identity.CopyFrom(identity)

    def _role(self, pid: int, place: Place) -> states.Role:
        if place.scheduler not in ("slurm", "kubernetes") and not place.role:
            return "user"
        try:
            stat = parse_stat(Path(f"{self._proc}/{pid}/stat").read_bytes())
            uid = parse_uid(Path(f"{self._proc}/{pid}/status").read_bytes())
        except OSError:
            return "user"
        return states.process_role(place, stat[0] if stat else "", uid)


def _tally(schedulers: Iterable[str]) -> Tally:
    kinds = list(schedulers)
    units = kinds.count("unit")
    return Tally(len(kinds) - units, units)


def _prefix(path: str, depth: int) -> str:
    return "/" + "/".join([part for part in path.split("/") if part][:depth])


def _pids(directory: str) -> list[int]:
    """Processes in one cgroup; none when it is gone."""
    try:
        with open(f"{directory}/cgroup.procs", "rb") as file:
            return [int(line) for line in file.read(1 << 22).split() if line.isdigit() and line != b"0"]
    except OSError:
        return []


def _populated(directory: str | None) -> bool | None:
    """The word of cgroup.events (v2 only), which also knows of processes in other pid namespaces."""
    try:
        with open(f"{directory}/cgroup.events", "rb") as file:
            return b"populated 1" in file.read(4096)
    except OSError:
        return None
