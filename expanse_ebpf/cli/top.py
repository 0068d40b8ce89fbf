"""`expanse-ebpf top`: the jobs of a node, live, as a table or as JSON."""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import click

from expanse_ebpf import config
from expanse_ebpf.errors import ConfigError, UnavailableError, UnknownJobError
from expanse_ebpf.top import plain, text
from expanse_ebpf.top.columns import SORT_KEYS
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.feed import Feed, LocalFeed, RemoteFeed
from expanse_ebpf.top.rates import Rates
from expanse_ebpf.wire.collector_pb2 import GpuEvent, JobIdentity, JobSample, Report

FIRST_REPORT_S = 10.0  # how long `--once` waits for any report
SECOND_REPORT_S = 3.0  # and then for another, since one report gives no rates
MOST_EVENTS = 1000  # of GPUs, kept of reports that are passed over


@click.command(
    "top",
    epilog="""\b
Examples:
  expanse-ebpf top                                  live; ? shows the keys
  expanse-ebpf top --once | less                    one table
  expanse-ebpf top --once --gpus                    one line per GPU and MIG instance
  expanse-ebpf top --once --json --job slurm/123    one object, for scripts
  expanse-ebpf top --json --count 60 > minute.jsonl
  expanse-ebpf top --controller head:9777 --node gpu017

\b
Job keys: slurm/123, kubernetes/NAMESPACE/POD, run/NAME, unit/NAME, container/ID""",
)
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option(
    "--json", "as_json", is_flag=True, help="JSON; without --once one object per line and interval."
)
@click.option("--gpus", is_flag=True, help="The node's GPUs instead of its jobs; live, g does the same.")
@click.option(
    "--job", "jobs", metavar="KEY", multiple=True, help="Only this job and its GPUs; may be repeated."
)
@click.option(
    "--sort",
    type=click.Choice(SORT_KEYS),
    default="cpu",
    show_default=True,
    help="Column to sort jobs by; GPUs stand by their index.",
)
@click.option("--every", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Print a table so often.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N snapshots.")
@click.option("--ascii", "ascii_only", is_flag=True, help="Nothing but ASCII.")
@click.option("--socket", metavar="PATH", envvar="EXPANSE_AGENT_SOCKET", help="The agent's Unix socket.")
@click.option("--controller", metavar="HOST:PORT", help="Look through a controller, at another node.")
@click.option("--node", metavar="NAME", help="Which of the controller's nodes.")
def command(
    once: bool,
    as_json: bool,
    gpus: bool,
    jobs: tuple[str, ...],
    sort: str,
    every: float | None,
    count: int | None,
    ascii_only: bool,
    socket: str | None,
    controller: str | None,
    node: str | None,
) -> None:
    """Show the jobs of this node and what they use.

    On a terminal it is a live view; anywhere else one table, or one every --every SECONDS. Root sees
    every job, a user their own and, of other users' GPUs, the figures alone.
    """
    if gpus and as_json:
        raise ConfigError("--gpus chooses the table; leave it out, --json has jobs and GPUs alike")
    given = click.get_current_context().get_parameter_source("sort")
    if gpus and given is click.core.ParameterSource.COMMANDLINE:
        raise ConfigError("--sort is for jobs; leave it out with --gpus, GPUs stand by their index")
    feed = _feed(socket, controller, node)
    selection = Selection(jobs, feed.where)
    locale = text.Locale(ascii_only or not text.locale_is_utf8(os.environ))
    interactive = _interactive()
    paced = as_json or every is not None or count is not None
    if not once and not paced and interactive and _can_draw(locale):
        from expanse_ebpf.top.app import TopApp  # 50 MiB that a plain table does without

        app = TopApp(feed, selection.keep, selection.require, sort, gpus)
        app.run()
        if app.failure is not None:
            raise app.failure
        return
    if once or not (paced or interactive):
        count = 1
    show = _json if as_json else lambda snapshot: _table(snapshot, sort, locale, gpus)
    snapshots = _snapshots(feed, selection, every, keys=interactive and count is None)
    try:
        for shown, snapshot in enumerate(snapshots, 1):
            if shown > 1 and not as_json:
                _write("\n")
            _write(_json(snapshot, indent=2) if once and as_json else show(snapshot))
            if shown == count:
                break
    except _UserQuitError:
        pass
    except KeyboardInterrupt:
        if not interactive:  # on a terminal it is a common way to end the view
            raise
    finally:
        snapshots.close()


class Selection:
    """The jobs that were asked for with --job; all when none were. Raises ConfigError for a bad key."""

    def __init__(self, keys: tuple[str, ...], where: str) -> None:
        self._missing = list(keys)
        self._where = where
        self._keys = keys
        if keys:
            from expanse_ebpf.wire.keys import matches

            self._matches: Callable[[JobIdentity, str], bool] = matches
            for key in keys:
                matches(JobIdentity(), key)  # a malformed key is told before anything else

    def keep(self, report: Report) -> Report:
        """`report` with only these jobs, their GPUs and what happened to those."""
        if not self._keys:
            return report
        for i in reversed(range(len(report.jobs))):
            hits = [key for key in self._keys if self._matches(report.jobs[i].identity, key)]
            self._missing = [key for key in self._missing if key not in hits]
            if not hits:
                del report.jobs[i]
        _keep_gpus_of(report.jobs, report)
        return report

    def require(self) -> None:
        """Raises UnknownJobError for a key that no report had."""
        if self._missing:
            whose = "" if os.geteuid() == 0 else " of yours"
            raise UnknownJobError(
                f"no job {self._missing[0]}{whose} at {self._where}; "
                "`expanse-ebpf top --once` lists those there are"
            )


def _keep_gpus_of(jobs: Iterable[JobSample], report: Report) -> None:
    """Take away the GPUs and instances that none of `jobs` holds, except the GPU that an instance is of."""
    runs = {(job.identity.scheduler, job.identity.id, job.identity.run) for job in jobs}
    held = {hold.uuid for job in jobs for hold in job.gpu.holds}
    held |= {g.uuid for g in report.gpus if any((h.scheduler, h.id, h.run) in runs for h in g.holders)}
    held |= {gpu.parent_uuid for gpu in report.gpus if gpu.uuid in held}
    for i in reversed(range(len(report.gpus))):
        if report.gpus[i].uuid not in held:
            del report.gpus[i]
    for i in reversed(range(len(report.gpu_events))):
        if report.gpu_events[i].uuid not in held:
            del report.gpu_events[i]


def _feed(socket: str | None, controller: str | None, node: str | None) -> Feed:
    if controller is not None:
        if socket is not None and click.get_current_context().get_parameter_source("socket") is (
            click.core.ParameterSource.COMMANDLINE
        ):
            raise ConfigError("--socket and --controller exclude each other; give one of them")
        config.split_address(controller, "--controller")
        return RemoteFeed(controller, node or "")
    if node is not None:
        raise ConfigError("--node needs --controller HOST:PORT; without it top shows this node")
    if socket is None:
        # The file may hold what only root may read; then the default stands.
        readable = os.access(config.DEFAULT_FILE, os.R_OK)
        socket = config.load().agent.socket if readable else config.AgentConfig().socket
    return LocalFeed(socket)


def _interactive() -> bool:
    """Whether somebody sits at a terminal who can both see and press keys."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _can_draw(locale: text.Locale) -> bool:
    """Whether the live view can be drawn; Textual draws on standard error."""
    terminal = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return terminal and not locale.ascii and sys.stderr is not None and sys.stderr.isatty()


def _snapshots(
    feed: Feed, selection: Selection, every: float | None, keys: bool = False
) -> Generator[Values, None, None]:
    """The newest snapshot, with rates where a second report can be had, then each later one.

    With `every` no more than one in that many seconds, its rates over all of them and with the GPUs'
    events of all. Ends when q was pressed, where `keys` are read.
    """
    rates = Rates()
    with _arrivals(feed, keys) as arrivals:
        report = _next(arrivals, FIRST_REPORT_S)
        if report is None:
            raise UnavailableError(f"{feed.where}: no report in {FIRST_REPORT_S:.0f} s; see the agent's log")
        snapshot = rates.add(selection.keep(report), feed.age(report))
        second = _next(arrivals, SECOND_REPORT_S)
        if second is not None:
            snapshot = rates.add(selection.keep(second), feed.age(second))
        shown = time.monotonic()
        selection.require()
        yield snapshot
        passed_over: deque[GpuEvent] = deque(maxlen=MOST_EVENTS)
        while True:
            report = _next(arrivals, None)
            if report is None:
                continue
            now = time.monotonic()
            age_s, report = feed.age(report), selection.keep(report)
            passed_over.extend(report.gpu_events)
            # Reports come at the agent's pace, so "every 5 s" is at the report nearest to that.
            if every is None or now - shown >= every * 0.9:
                shown = now
                del report.gpu_events[:]
                report.gpu_events.extend(passed_over)
                passed_over.clear()
                yield rates.add(report, age_s)


class _UserQuitError(Exception):
    """Somebody pressed q."""


def _next(arrivals: queue.SimpleQueue[Report | Exception], timeout: float | None) -> Report | None:
    """The next report, None when there was none in time; raises what the feed raised."""
    try:
        arrival = arrivals.get(timeout=timeout)
    except queue.Empty:
        return None
    if isinstance(arrival, Exception):
        raise arrival
    return arrival


@contextmanager
def _arrivals(feed: Feed, keys: bool) -> Iterator[queue.SimpleQueue[Report | Exception]]:
    """Reports as they come, by threads, so that a key or a signal is noticed at once."""
    arrivals: queue.SimpleQueue[Report | Exception] = queue.SimpleQueue()
    done = threading.Event()

    def follow() -> None:
        try:
            for report in feed.reports(2, done.is_set):
                arrivals.put(report)
            arrivals.put(
                UnavailableError(f"{feed.where}: the reports ended; see whether the agent still runs")
            )
        except Exception as error:  # raised again by the reader of the queue
            arrivals.put(error)

    def listen() -> None:
        while os.read(sys.stdin.fileno(), 1) not in (b"q", b"Q", b""):
            pass
        arrivals.put(_UserQuitError())

    with _single_keys() if keys else nullcontext():
        threading.Thread(target=follow, daemon=True).start()
        if keys:
            threading.Thread(target=listen, daemon=True).start()
        try:
            yield arrivals
        finally:
            done.set()


@contextmanager
def _single_keys() -> Iterator[None]:
    """The terminal hands over each key at once, without Enter and without showing it."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _table(snapshot: Values, sort: str, locale: text.Locale, gpus: bool) -> str:
    if sys.stdout is None or not sys.stdout.isatty():
        return plain.render(snapshot, sort=sort, locale=locale, devices=gpus)
    width, height = shutil.get_terminal_size()
    return plain.render(snapshot, width, height, sort, locale, gpus)


def _json(snapshot: Values, indent: int | None = None) -> str:
    """Strict JSON in ASCII; DEL, which JSON leaves as it is, steers terminals too."""
    return json.dumps(snapshot, indent=indent, allow_nan=False).replace("\x7f", "\\u007f") + "\n"


def _write(output: str) -> None:
    if sys.stdout is None:
        raise UnavailableError("standard output is closed; give top somewhere to write to")
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(output.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
