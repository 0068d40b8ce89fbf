"""What a bench leaves: a folder with `plan.toml` and `runs.jsonl`, from which every table and plot is made.

`runs.jsonl` has one JSON object per line, in the order in which things happened; `kind` says which of the
classes here it is. A line is written when a run is over and is on the disk before the next run begins, so
what was done is kept whatever ends the bench.
"""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, Literal

from expanse_ebpf.errors import ConfigError, UnavailableError

FILE, PLAN = "runs.jsonl", "plan.toml"
_MOST_LINE = 1 << 20
_LARGEST = 1 << 63

Role = Literal["off", "arm", "warm_up"]
OFF: Final = "off"


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and its software, once per start of the bench. None: not known."""

    time_ns: int  # since the epoch
    host: str
    kernel: str  # as uname -r
    architecture: str
    cpu: str  # the model's name
    cpus: int  # online
    memory_bytes: int
    virtualised: str | None  # e.g. "kvm"; "" on bare metal
    pmu: bool | None  # whether hardware counters can be opened
    governor: str | None
    turbo: bool | None
    smt: bool | None
    gpus: tuple[str, ...]  # models
    driver: str | None
    python: str
    expanse: str  # version of this kit and of the collector that it starts
    tools: dict[str, str] = field(default_factory=dict)  # program of a peer arm to its version


@dataclass(frozen=True, slots=True)
class State:
    """How the machine was doing: at a run's begin, `steal_share` and `other_cores` during it."""

    load_1m: float
    frequency_mhz: float | None  # mean over the CPUs
    temperature_c: float | None  # the hottest of the CPUs' sensors, where they can be told, else of all
    gpu_temperature_c: float | None
    steal_share: float | None  # of all CPUs' time, taken by the hypervisor
    other_cores: float | None  # used by what is neither job nor arm nor this kit


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of one part took while the job ran. None: not known, see `Run.missing`."""

    cpu_s: float
    pss_peak_bytes: int | None
    disk_bytes: int | None  # written
    sent_bytes: int | None  # over the network, to the controller


@dataclass(frozen=True, slots=True)
class Samples:
    """What of the job's samples came into the store, of those that were due while it ran."""

    interval_s: float
    expected: int
    received: int
    longest_gap_s: float | None
    age_median_s: float | None  # of the newest sample in the store, whenever it was looked at
    looks: int  # how often that was


@dataclass(frozen=True, slots=True)
class Windows:
    """Deep-trace windows on the job."""

    opened: int
    traced_s: float
    probes_most: int  # attached at any one time


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload, beside an arm or beside nothing.

    Runs with the same workload, arm and `pair` belong together: one has the role "off", one "arm". Of a pair
    that was begun anew after an interruption the later `attempt` counts. Those with the role "warm_up" (pair
    0) count for no time; the one beside the arm is watched closely: BPF run time, age of samples, peak PSS.
    """

    workload: str
    arm: str  # the one that is compared, in the off run of its pair too
    role: Role
    pair: int  # from 1; 0: warm-up
    attempt: int
    position: int  # in the pair, 0 or 1
    started_ns: int  # since the epoch
    seconds: float | None  # the time that is compared; None: failed
    wall_s: float  # from start to exit
    state: State
    job_cpu_s: float | None
    job_memory_peak_bytes: int | None  # anonymous memory of all its processes
    watched: bool  # whether an arm ran
    collector: Usage | None = None  # absent in off runs
    controller: Usage | None = None
    bpf_s_per_s: float | None = None  # run time of the arm's BPF programs
    samples: Samples | None = None
    windows: Windows | None = None
    missing: dict[str, str] = field(default_factory=dict)  # field to the reason why it is None
    failed: str = ""  # why there are no `seconds`


@dataclass(frozen=True, slots=True)
class End:
    """Why no more pairs of an arm were run: "agreed", "max_pairs" or "failed"."""

    workload: str
    arm: str
    reason: Literal["agreed", "max_pairs", "failed"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Session:
    """One start of the bench in this folder."""

    time_ns: int
    seed: int
    max_pairs: int
    resumed: bool


Record = Machine | Session | Run | End
_KINDS: dict[str, type[Record]] = {"machine": Machine, "session": Session, "run": Run, "end": End}


def line(record: Record) -> str:
    """A record as one line of JSON, without the line's end."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(record, cls))
    return json.dumps({"kind": kind, **asdict(record)}, allow_nan=False)


def parse(text: str) -> Record:
    """One line's record; raises ValueError that says what is wrong with it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict) or value.get("kind") not in _KINDS:
        raise ValueError("no record of a kind that is known")
    return typing.cast(Record, _built(_KINDS[value.pop("kind")], value))


def _built(cls: type[Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"an object is wanted for {cls.__name__.lower()}")
    hints = typing.get_type_hints(cls)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{min(unknown)!r} is not known in {cls.__name__.lower()}")
    made = {}
    for each in fields(cls):
        if each.name in value:
            made[each.name] = _typed(hints[each.name], value[each.name], each.name)
    try:
        return cls(**made)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _typed(kind: Any, value: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _typed(next(a for a in arguments if a is not type(None)), value, name)
    if is_dataclass(kind):
        return _built(typing.cast(type[Any], kind), value)
    if origin is Literal:
        fits = value in arguments
    elif origin is tuple:
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        value = tuple(value) if fits else value
    elif origin is dict:
        fits = isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    elif kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
    else:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        fits = fits and (kind is not int or abs(value) < _LARGEST)
    if not fits:
        raise ValueError(f"{name}: {value!r} is not valid")
    return value


def create(path: Path) -> int:
    """A descriptor of a file to be written, made if need be; raises OSError.

    A bench runs as root, its folder may be somebody's: what lies there as a link is not followed.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


class Results:
    """The records of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[Record] = []

    @classmethod
    def read(cls, folder: Path) -> Results:
        """What is in a folder; raises ConfigError for what is no bench's, or is damaged.

        A last line without its end is one that was being written when the machine stopped: it is left out.
        """
        results = cls(folder)
        try:
            text = (folder / FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{folder}: no bench was run here (there is no {FILE})") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{folder / FILE}: {error}") from None
        for number, each in enumerate(text.split("\n")[:-1], 1):
            try:
                if len(each) > _MOST_LINE:
                    raise ValueError("the line is too long")
                results.records.append(parse(each))
            except ValueError as error:
                raise ConfigError(f"{folder / FILE}, line {number}: {error}") from None
        return results

    def add(self, record: Record) -> None:
        """Append to the file, and have it on the disk; raises UnavailableError."""
        try:
            self._append(record)
        except OSError as error:
            raise UnavailableError(f"{self.folder / FILE}: {error.strerror}") from None
        self.records.append(record)

    def _append(self, record: Record) -> None:
        with os.fdopen(create(self.folder / FILE), "r+b") as file:
            whole = file.seek(0, os.SEEK_END)
            if whole and self._tail(whole):
                file.truncate(whole - self._tail(whole))
                file.seek(0, os.SEEK_END)
            file.write(line(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _tail(self, size: int) -> int:
        """Bytes after the last line's end: what was being written when the machine stopped."""
        with open(self.folder / FILE, "rb") as file:
            file.seek(max(0, size - _MOST_LINE))
            return len(file.read().rpartition(b"\n")[2])

    @property
    def machine(self) -> Machine | None:
        """As it was when the bench began."""
        return next((r for r in self.records if isinstance(r, Machine)), None)

    @property
    def runs(self) -> Iterator[Run]:
        """All runs, failed ones and warm-up included."""
        return (record for record in self.records if isinstance(record, Run))

    def cells(self) -> list[tuple[str, str]]:
        """(workload, arm) of everything that was run, in the order of the first run."""
        return list(dict.fromkeys((run.workload, run.arm) for run in self.runs))

    def pairs(self, workload: str, arm: str) -> list[tuple[Run, Run]]:
        """(off, arm) of every pair that is complete, in the order in which they were run."""
        latest: dict[int, dict[str, Run]] = {}
        for run in self.runs:
            if (run.workload, run.arm) == (workload, arm) and run.pair and run.seconds is not None:
                pair = latest.setdefault(run.pair, {})
                if any(other.attempt < run.attempt for other in pair.values()):
                    pair.clear()
                pair[run.role] = run
        return [(pair["off"], pair["arm"]) for pair in latest.values() if pair.keys() == {"off", "arm"}]

    def end(self, workload: str, arm: str) -> End | None:
        """Why no more pairs were run; None: the bench was ended before, or has gone on since."""
        of = [r for r in self.records if isinstance(r, (Run, End)) and (r.workload, r.arm) == (workload, arm)]
        return of[-1] if of and isinstance(of[-1], End) else None
