"""`expanse-ebpf profile`: which Python lines a job's or a process's time goes to."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from expanse_ebpf import config
from expanse_ebpf.errors import ConfigError, ExpanseError, UnavailableError, UnknownJobError
from expanse_ebpf.text import clean

if TYPE_CHECKING:
    from expanse_ebpf.cli.profile_session import Session, Target
    from expanse_ebpf.cli.profile_summary import Summary
    from expanse_ebpf.wire.profile_pb2 import Profile

FORMATS = ("collapsed", "pprof", "speedscope", "html")
_ENDINGS = {
    ".html": "html",
    ".htm": "html",
    ".json": "speedscope",
    ".pb.gz": "pprof",
    ".pb": "pprof",
    ".pprof": "pprof",
}
DEFAULT_S = 10.0
LEAST_S = 0.1
_ENDED = "a controller may have the stacks of one that has ended: --controller HOST:PORT"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class NothingProfiledError(ExpanseError):
    """Not one stack could be resolved; the message says why."""


@click.command(
    "profile",
    short_help="Show which Python lines a job's time goes to.",
    context_settings={"allow_extra_args": True},  # to say what was meant
    epilog="""\b
Examples:
  expanse-ebpf profile --job run/train                        a summary, after 10 s
  expanse-ebpf profile --job run/train > train.txt            collapsed stacks, for scripts
  expanse-ebpf profile --job slurm/123 -o train.html          a flame graph for a browser
  expanse-ebpf profile --pid 4711 --duration 60 --rate 99 -o train.pb.gz
  expanse-ebpf profile --job run/train --json                 shares and hottest lines, for scripts
  expanse-ebpf profile --controller head:9777 --job slurm/123 --from 2h --to 1h -o hour.html

\b
Job keys: slurm/123, kubernetes/NAMESPACE/POD, run/NAME, unit/NAME, container/ID""",
)
@click.option("-j", "--job", "key", metavar="KEY", help="The job to profile.")
@click.option(
    "-p",
    "--pid",
    type=click.IntRange(1, (1 << 31) - 1),
    metavar="PID",
    help="The process to profile, with what it forks.",
)
@click.option(
    "-d",
    "--duration",
    metavar="TIME",
    help=f"How long: 30s, 5m, 1h; Ctrl-C ends it early.  [default: {DEFAULT_S:g}s]",
)
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="What to write.  [default: by FILE's ending, else collapsed; on a terminal the summary alone]",
)
@click.option(
    "--value",
    type=click.Choice(("cpu", "waiting", "samples")),
    help="What collapsed stacks count: nanoseconds on CPUs, nanoseconds of waiting, or samples."
    "  [default: cpu; waiting where there is none]",
)
@click.option(
    "-r",
    "--rate",
    "rate_hz",
    type=click.IntRange(1, config.MAX_RATE_HZ),
    metavar="HZ",
    help="Samples per second of each CPU.  [default: the agent's, else python.rate_hz]",
)
@click.option("-o", "--output", metavar="FILE", help="Where to write it; - is standard output.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of the stacks.")
@click.option(
    "--socket",
    metavar="PATH",
    envvar="EXPANSE_AGENT_SOCKET",
    help="The agent's Unix socket: it has to answer there.",
)
@click.option("--controller", metavar="HOST:PORT", help="Merge what a controller has stored of the job.")
@click.option("--node", metavar="NAME", help="(with --controller) Of this node alone.")
@click.option(
    "--from",
    "begin",
    metavar="TIME",
    help="(with --controller) From when: 2h (ago), or a date.  [default: 10m]",
)
@click.option("--to", "end", metavar="TIME", help="(with --controller) Until when.  [default: now]")
def command(
    key: str | None,
    pid: int | None,
    form: str | None,
    value: str | None,
    output: str | None,
    as_json: bool,
    controller: str | None,
    **options: Any,
) -> None:
    """Sample the Python stacks of a job or a process, on CPUs and waiting, without stopping it.

    The node's agent does it where one runs, for root and for the owner of the job. Without an agent, or
    at another rate than the agent's, this command does it itself, as root or with CAP_BPF, CAP_PERFMON
    and CAP_SYS_PTRACE. A summary, which says who did, goes to standard error.

    The exit code is 0 when anything could be profiled, or the process did nothing; 3 when there is no
    such job or process; else 1.
    """
    context = click.get_current_context()
    if context.args:
        stray = clean(context.args[0], 80)
        meant = f"--pid {stray}" if stray.isdecimal() else f"--job {stray}"
        raise ConfigError(f"{stray!r} stands alone: use {meant}")
    if (key is None) == (pid is None):
        raise ConfigError("give either --job KEY or --pid PID")
    out = Output(form, output, value, as_json)
    if controller is not None:
        _refuse(options, ("duration", "rate_hz", "socket"), "goes with a live profile, not with --controller")
        profile, title, note = _stored(controller, key, options)
        sampler, unavailable = "", dict[str, str]()
    else:
        _refuse(options, ("node", "begin", "end"), "needs --controller HOST:PORT")
        from expanse_ebpf.cli.profile_session import OwnSession, Target, local
        from expanse_ebpf.wire.keys import parse_key

        if key is not None:
            parse_key(key)
        target = Target(key or "", pid or 0)
        given = options["duration"]
        duration = DEFAULT_S if given is None else seconds(given, "--duration")
        title = str(target)
        settings = config.load() if os.access(config.DEFAULT_FILE, os.R_OK) else config.Config()
        named = context.get_parameter_source("socket") is click.core.ParameterSource.COMMANDLINE
        path = options["socket"] or settings.agent.socket
        try:
            session = local(path, target, options["rate_hz"], settings, named)
        except UnknownJobError as error:
            raise (UnknownJobError(f"{error}; {_ENDED}") if key else error) from None
        profile, note = _sample(session, duration)
        sampler = session.sampler
        unavailable = session.unavailable if isinstance(session, OwnSession) else {}
    from expanse_ebpf.cli.profile_summary import Summary

    summary = Summary.of(profile, title, note, unavailable, sampler)
    if controller is None:
        _require(summary, target)
    out.write(profile, summary)


def _refuse(options: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    flags = {"rate_hz": "rate", "begin": "from", "end": "to"}
    source = click.get_current_context().get_parameter_source
    for name in names:
        if options[name] is not None and source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{flags.get(name, name)} {why}")


# ---- sampling


def _sample(session: Session, seconds: float) -> tuple[Profile, str]:
    """What is sampled in so many seconds, or until Ctrl-C; and what was said meanwhile."""
    from expanse_ebpf.cli.profile_summary import Progress
    from expanse_ebpf.export import pprof

    profiles: list[Profile] = []
    note = ""
    deadline = time.monotonic() + seconds
    with _ended_early() as early, Progress(sys.stderr) as progress:

        def stop() -> bool:
            left = deadline - time.monotonic()
            progress.show(left)
            return early.happened or left <= 0

        for part in session.parts(stop):
            note = part.note
            progress.add(part.profile)
            profiles.append(part.profile)
            if len(profiles) > 64:  # an hour of parts would be many
                profiles = [pprof.merge(profiles)]
    return pprof.merge(profiles), note


class _Early:
    """Whether somebody has had enough."""

    happened = False


@contextmanager
def _ended_early() -> Iterator[_Early]:
    """The first SIGINT or SIGTERM ends the sampling, with what there is; the second this process."""
    early = _Early()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def noticed(*_: object) -> None:
        early.happened = True
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, noticed) for number in numbers}
    try:
        yield early
    finally:
        if not early.happened:
            for number, handler in before.items():
                signal.signal(number, handler)


def _require(summary: Summary, target: Target) -> None:
    """Raises NothingProfiledError when nothing could be profiled, with the reason in words.

    Having done nothing is not one.
    """
    from expanse_ebpf.sources.stack_counts import in_words

    if summary.resolved:
        return
    why, note = ", ".join(summary.reasons), summary.note
    if note.endswith("has ended") and not why:
        why = f"exited: {note} before anything could be sampled"
        why += f"; {_ENDED}" if target.key else ""
    elif summary.reasons[:1] == [in_words("opted_out")] and target.key:
        why = f"{summary.reasons[0]}: EXPANSE_PROFILE=off is in its processes' environment"
    elif note and (not why or note.startswith(summary.reasons[0])):
        why = note  # the same with its detail
    elif not why and target.pid:
        why = _refusal(target.pid)
    if why:
        raise NothingProfiledError(f"{target}: nothing could be profiled: {why}")


def _refusal(pid: int) -> str:
    """Why a process that did nothing could not be profiled anyway; empty when it could."""
    from expanse_ebpf.python_stacks.interpreter import Interpreters, Reason, Refusal
    from expanse_ebpf.sources.stack_counts import in_words

    found = Interpreters().find(pid)
    if not isinstance(found, Refusal) or found.reason is Reason.STARTING:
        return ""
    return f"{in_words(found.reason)}: {found.detail}"


# ---- what a controller has stored


def _stored(address: str, key: str | None, options: dict[str, Any]) -> tuple[Profile, str, str]:
    from expanse_ebpf.export import pprof
    from expanse_ebpf.ship import remote
    from expanse_ebpf.wire.keys import parse_key

    if key is None:
        raise ConfigError("a controller stores profiles of jobs: give --job KEY instead of --pid")
    parse_key(key)
    config.split_address(address, "--controller")
    now = time.time_ns()
    begin = moment(options["begin"] or "10m", now, "--from")
    end = moment(options["end"], now, "--to") if options["end"] else now
    if begin >= end:
        raise ConfigError("--from is not earlier than --to")
    reply = remote.fetch_profile(address, key, node=options["node"] or "", from_ns=begin, to_ns=end)
    if not reply.pprof:
        raise NothingProfiledError(
            f"controller {address} has no stacks of {key} between {_iso(begin)} and {_iso(end)}; "
            "--from and --to choose another time"
        )
    parts = f"{reply.parts} part{'' if reply.parts == 1 else 's'}"
    note = f"{parts}, {_iso(reply.from_ns)} to {_iso(reply.to_ns)}"
    return pprof.loads(reply.pprof), key, note


def seconds(text: str, flag: str) -> float:
    """A length of time given as "30", "30s", "5m" or "1h". Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", text, re.ASCII)
    length = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if length < LEAST_S:
        raise ConfigError(
            f"{flag}: {text[:80]!r} is not a time of {LEAST_S:g} s or more: use 30, 30s, 5m or 1h"
        )
    return length


def moment(text: str, now_ns: int, flag: str) -> int:
    """A time given as "90s", "10m", "2h", "3d" (ago), or as an ISO date: nanoseconds since 1970 UTC.

    A date without a zone is local time. Raises ConfigError.
    """
    ago = re.fullmatch(r"-?(\d{1,9}(?:\.\d{1,9})?)([smhd])", text)
    try:
        if ago:
            return now_ns - round(float(ago[1]) * _UNITS[ago[2]] * 1e9)
        return round(datetime.fromisoformat(text).timestamp()) * 10**9
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"{flag}: {text[:80]!r} is not a time: use 90s, 10m, 2h or 3d (ago), or 2026-11-30T14:05:00Z"
        ) from None


def _iso(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- output


class Output:
    """Where the result goes and in which form; what cannot be is told before anything is sampled."""

    def __init__(self, form: str | None, path: str | None, value: str | None, as_json: bool) -> None:
        """Raises ConfigError."""
        self._path = None if path in (None, "-") else Path(str(path))
        self._value = value
        self._json = as_json
        unsaid = all(choice is None for choice in (path, form, value)) and not as_json
        on_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
        self._for_people = unsaid and on_terminal
        if form is None:
            name = self._path.name.lower() if self._path else ""
            if name.endswith((".svg", ".png", ".pdf")):
                kind, other = name[-3:].upper(), Path(str(path)).with_suffix(".html")
                raise ConfigError(f"-o {path}: no {kind} is made; -o {other} is a flame graph")
            form = next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), "collapsed")
        self._form = form
        if value is not None and form != "collapsed":
            raise ConfigError("--value goes with --format collapsed; the other formats hold all values")
        if self._path is not None:
            _check_writable(self._path)
        elif sys.stdout is None:
            raise UnavailableError("standard output is closed; give -o FILE")
        elif form == "pprof" and not as_json and sys.stdout.isatty():
            raise ConfigError("pprof is binary and would upset the terminal; give -o FILE.pb.gz, or a pipe")
        elif form == "html" and not as_json and sys.stdout.isatty():
            raise ConfigError("HTML is for a browser, not for a terminal; give -o FILE.html, or a pipe")

    def write(self, profile: Profile, summary: Summary) -> None:
        """Write the stacks and the summary. Raises UnavailableError."""
        note = ""
        if self._path is not None or not (self._json or self._for_people):
            data, note = self._made(profile, summary)
            self._write(data)
        if self._json:
            _print(json.dumps(summary.as_json(), indent=2).encode("ascii") + b"\n")
        elif sys.stderr is not None:
            lines = [*summary.lines(_width()), *([note] if note else [])]
            if self._path is not None:
                lines.append(f"written to {self._path} ({self._form})")
            elif self._for_people:
                lines.append("-o train.html for a flame graph; --format collapsed for the stacks")
            from expanse_ebpf.top import text

            click.echo("\n".join(map(text.clean, lines)), err=True)

    def _made(self, profile: Profile, summary: Summary) -> tuple[bytes, str]:
        if self._form == "pprof":
            from expanse_ebpf.export.pprof import dumps

            return dumps(profile), ""
        if self._form == "speedscope":
            from expanse_ebpf.export.speedscope import speedscope

            return speedscope(profile, summary.title).encode(), ""
        if self._form == "html":
            from expanse_ebpf.export.flamegraph import flamegraph

            return flamegraph(profile, summary.title).encode(), ""
        from expanse_ebpf.export.collapsed import collapsed

        value, note = self._value or "cpu", ""
        if self._value is None and not summary.cpu_ns and summary.waiting_ns:
            value, note = "waiting", "nothing ran on a CPU: the stacks are of waiting threads"
        return collapsed(profile, value).encode(), note

    def _write(self, data: bytes) -> None:
        if self._path is None:
            _print(data)
            return
        try:
            self._path.write_bytes(data)
        except OSError as error:
            raise UnavailableError(f"cannot write {self._path}: {error.strerror}; give another -o") from None


def _check_writable(path: Path) -> None:
    """Raises ConfigError for a place at which no file can be written."""
    try:
        there = path.exists()
    except OSError as error:  # a name that is too long, for one
        raise ConfigError(f"-o {path}: {error.strerror}; give another") from None
    if path.is_dir():
        raise ConfigError(f"-o {path}: is a directory; name a file in it")
    if not there and not path.parent.is_dir():
        raise ConfigError(f"-o {path}: there is no directory {path.parent}; make it, or name another")
    if not os.access(path if there else path.parent, os.W_OK):
        raise ConfigError(f"-o {path}: permission denied; name another file")


def _print(data: bytes) -> None:
    if sys.stdout is None:
        raise UnavailableError("standard output is closed; give -o FILE")
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _width() -> int | None:
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    return shutil.get_terminal_size().columns
