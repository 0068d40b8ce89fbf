"""A bench from its begin, or from where it was ended, until every arm has pairs enough."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from expanse_ebpf.bench import machine, plan, run, schedule, statistics
from expanse_ebpf.bench.plan import Plan
from expanse_ebpf.bench.results import FILE, OFF, PLAN, End, Machine, Results, Role, Run, Session, create
from expanse_ebpf.bench.schedule import Cell
from expanse_ebpf.errors import ConfigError, ExpanseError

_ATTEMPTS = 3  # of one pair, before its arm is given up


class Progress(Protocol):
    """Who is told how it goes."""

    def begins(self, text: str, least_s: float | None, most_s: float | None, share: float) -> None:
        """A run begins. It will go on for so long, unless it fails; `share` of the whole is done."""

    def says(self, text: str) -> None:
        """Something to keep on the screen."""


class GaveUpError(Exception):
    """No more runs of a cell are worth while."""


class Bench:
    """The runs of one plan, whose records go into one folder."""

    def __init__(
        self, comparisons: Plan, results: Results, progress: Progress, *, seed: int, max_pairs: int
    ) -> None:
        self.results = results
        self._plan = comparisons
        self._progress = progress
        self._seed, self._max_pairs = seed, max_pairs
        self._cells = schedule.cells(comparisons)
        self._warm: dict[str, Run] = {}  # a workload's warm-up run beside nothing, in this session
        self._warm_arms: set[tuple[str, str]] = set()
        self._ended: set[tuple[str, str]] = (
            set()
        )  # in this session; what an earlier one gave up is tried again

    def go(self) -> None:
        """Run until all is done; what is raised in between (Ctrl-C) leaves records of what was done."""
        rounds = 0
        while active := [cell for cell in self._cells if not self._done(cell)]:
            rounds += 1
            for cell in schedule.round_order(self._seed, rounds, active):
                try:
                    self._warm_up(cell)
                    self._pair(cell)
                except (GaveUpError, ExpanseError) as error:
                    self._end(End(*cell.names, "failed", str(error)))
                    self._progress.says(f"{cell}: given up: {error}")

    def _done(self, cell: Cell) -> bool:
        """Whether there are pairs enough, or the cell was given up."""
        if cell.names in self._ended:
            return True
        pairs, rule = self._times(cell), self._plan.stopping
        if statistics.enough(
            pairs, min_pairs=rule.min_pairs, centres=rule.centres, within_points=rule.within_points
        ):
            end = End(*cell.names, "agreed")
        elif len(pairs) >= self._max_pairs:
            end = End(*cell.names, "max_pairs")
        else:
            return False
        self._end(end)
        self._progress.says(f"{cell}: {statistics.compare(pairs).sentence()}")
        return True

    def _end(self, end: End) -> None:
        self._ended.add((end.workload, end.arm))
        if self.results.end(end.workload, end.arm) != end:
            self.results.add(end)

    def _times(self, cell: Cell) -> list[tuple[float, float]]:
        return [(off.seconds or 0, arm.seconds or 0) for off, arm in self.results.pairs(*cell.names)]

    def _warm_up(self, cell: Cell) -> None:
        """Fill caches, and watch the arm closely, once per session."""
        name = cell.workload.name
        if name not in self._warm:
            done = self._run(cell, "warm_up", watched=False)
            if done.failed:
                raise GaveUpError(f"{name} failed without any arm: {done.failed}")
            self._warm[name] = done
        if cell.names not in self._warm_arms:
            done = self._run(cell, "warm_up", watched=True)
            if done.failed:
                raise GaveUpError(done.failed)
            self._warm_arms.add(cell.names)

    def _pair(self, cell: Cell) -> None:
        """One pair more, begun anew when a run of it fails."""
        number = len(self.results.pairs(*cell.names)) + 1
        begun = [r.attempt for r in self.results.runs if (r.workload, r.arm, r.pair) == (*cell.names, number)]
        first = max(begun, default=0) + 1
        for attempt in range(first, first + _ATTEMPTS):
            for position, role in enumerate(schedule.pair_order(self._seed, cell, number)):
                done = self._run(
                    cell, role, watched=role != OFF, pair=number, attempt=attempt, position=position
                )
                if done.failed:
                    self._progress.says(f"{cell}, pair {number}: a run failed: {done.failed}")
                    break
            else:
                return
        raise GaveUpError(f"pair {number} failed {_ATTEMPTS} times: {done.failed}")

    def _run(
        self,
        cell: Cell,
        role: Role,
        *,
        watched: bool,
        pair: int = 0,
        attempt: int = 1,
        position: int = 0,
    ) -> Run:
        what = "warm-up" if role == "warm_up" else f"pair {pair}"
        beside = cell.arm.name if watched else "nothing"
        least, most, share = self._outlook()
        self._progress.begins(f"{cell.workload.name} beside {beside} ({what})", least, most, share)
        warm = self._warm.get(cell.workload.name)
        done = run.measure(
            self._plan,
            cell.workload,
            cell.arm,
            watched=watched,
            closely=watched and role == "warm_up",
            role=role,
            pair=pair,
            attempt=attempt,
            position=position,
            expected_s=warm.wall_s if warm else None,
        )
        self.results.add(done)
        return done

    def _outlook(self) -> tuple[float | None, float | None, float]:
        """Seconds until the end at least and at most, as far as run times are known; and the share done."""
        least = most = spent = 0.0
        known = True
        for cell in self._cells:
            runs = [r for r in self.results.runs if r.workload == cell.workload.name and not r.failed]
            pairs = len(self.results.pairs(*cell.names))
            ended = cell.names in self._ended
            if not runs:
                known = known and ended
                continue
            each = 2 * (self._plan.settle_s + sum(r.wall_s for r in runs) / len(runs))
            least += 0 if ended else each * max(0, self._plan.stopping.min_pairs - pairs)
            most += 0 if ended else each * max(0, self._max_pairs - pairs)
            spent += each * pairs
        share = spent / (spent + (least + most) / 2) if spent else 0.0
        return (least, most, share) if known else (None, None, 0.0)


def check_same(before: Machine | None, now: Machine) -> None:
    """Raise ConfigError where a bench would go on on another machine than it began on."""
    for what in ("host", "kernel", "cpu", "cpus"):
        if before is not None and getattr(before, what) != getattr(now, what):
            raise ConfigError(
                f"the bench began with {what} {getattr(before, what)!r}, here it is {getattr(now, what)!r}: "
                "these cannot be put beside each other; begin anew with another -o"
            )


@contextmanager
def opened(
    path: Path, folder: Path, *, resume: bool, seed: int | None, max_pairs: int | None, progress: Progress
) -> Iterator[Bench]:
    """The bench of the plan at `path` in `folder`, which nobody else works in meanwhile.

    Raises ConfigError where there is one already and `resume` is not asked for, where the plan is another one
    than before, or the seed, or the machine; and what `run.check` raises.
    """
    comparisons, text = plan.load(path), _read(path)
    run.check(comparisons)
    results = _folder(folder, text, resume)
    with _alone(folder):
        sessions = [r for r in results.records if isinstance(r, Session)]
        if sessions and seed is not None and seed != sessions[0].seed:
            raise ConfigError(f"--seed: the bench began with {sessions[0].seed}, which orders all its runs")
        if sessions:
            seed = sessions[0].seed
        elif seed is None:
            seed = comparisons.seed if comparisons.seed is not None else secrets.randbits(32)
        most = max_pairs or comparisons.stopping.max_pairs
        if most < comparisons.stopping.min_pairs:
            raise ConfigError(f"--max-pairs: {most} is less than the plan's {comparisons.stopping.min_pairs}")
        here = machine.describe(run.tools(comparisons))
        check_same(results.machine, here)
        results.add(here)
        results.add(Session(time.time_ns(), seed, most, bool(sessions)))
        yield Bench(comparisons, results, progress, seed=seed, max_pairs=most)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _folder(folder: Path, text: str, resume: bool) -> Results:
    """The records so far; a folder that is new gets a copy of the plan."""
    if (folder / FILE).exists():
        if not resume:
            raise ConfigError(f"{folder}: a bench was run here; go on with --resume, or give another -o")
        if _read(folder / PLAN) != text:
            raise ConfigError(f"{folder / PLAN} is another plan than this one; begin anew with another -o")
        return Results.read(folder)
    if resume:
        raise ConfigError(f"{folder}: there is no bench to resume")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(create(folder / PLAN), "w", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
    except OSError as error:
        raise ConfigError(f"{folder}: {os.strerror(error.errno or 0)}") from None
    return Results(folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"{folder}: another bench is running in it") from None
    finally:
        os.close(descriptor)
