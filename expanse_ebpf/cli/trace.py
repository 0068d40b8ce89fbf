"""`expanse-ebpf trace`: every CUDA and NCCL call of a job, for some seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from expanse_ebpf import config
from expanse_ebpf.cli.profile import LEAST_S, seconds
from expanse_ebpf.cli.trace_file import PerfettoFile
from expanse_ebpf.errors import ConfigError, ExpanseError, UnavailableError, UnknownJobError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from expanse_ebpf.cli.trace_session import Windows
    from expanse_ebpf.wire.collector_pb2 import TraceRequest

MOST_S = 3600.0
_COMPLETION_S = 2.0


class NoProbePointError(ExpanseError):
    """The job's processes have no function that can be probed."""

    exit_code = 4


class BudgetError(ExpanseError):
    """What windows may take of the job is spent."""

    exit_code = 5


# By state: what is raised when no node has a trace, what stands for a missing reason, and what helps. Where
# nodes differ the first of these is told. `{through}` is the controller's flag, or nothing.
_WITHOUT_TRACE: dict[str, tuple[type[ExpanseError], str, str]] = {
    "failed": (UnavailableError, "the window failed", "the agent's log may say more"),
    "budget": (
        BudgetError,
        "the job's windows have used up what they may; --share raises that",
        "",
    ),
    "no_probe_point": (
        NoProbePointError,
        "nothing that its processes map has a function that can be probed",
        "`expanse-ebpf check` says what this node can do",
    ),
    "no_targets": (
        UnknownJobError,
        "there is no such job, or it has no process",
        "`expanse-ebpf top --once{through}` lists the jobs there are",
    ),
}


def job_keys(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The jobs of this node's agent, for a shell's completion; none where it does not answer."""
    import time

    from click.shell_completion import CompletionItem

    try:
        from expanse_ebpf.top import client

        until = time.monotonic() + _COMPLETION_S
        for report in client.watch(settings().agent.socket, history=1, stop=lambda: time.monotonic() > until):
            keys = sorted({f"{job.identity.scheduler}/{job.identity.id}" for job in report.jobs})
            return [CompletionItem(key) for key in keys if key.startswith(begun)]
    except ExpanseError:
        pass
    return []


@click.command(
    "trace",
    short_help="Trace every GPU call of a job for some seconds.",
    epilog="""\b
Examples:
  expanse-ebpf trace slurm/123                 25 s, all its nodes: a summary
  expanse-ebpf trace run/x -s 5 -o x.pftrace   a file for ui.perfetto.dev too
  expanse-ebpf trace run/x --stacks            and the Python line of launches
  expanse-ebpf trace slurm/123 --json | jq .summary
  expanse-ebpf trace slurm/123 --controller head:9777 --node gpu017

\b
Job keys: slurm/123, kubernetes/NAMESPACE/POD, run/NAME, unit/NAME,
          container/ID""",
)
@click.argument("key", metavar="JOB", required=False, shell_complete=job_keys)
@click.option("-j", "--job", "named", metavar="KEY", shell_complete=job_keys, help="The same as JOB.")
@click.option(
    "-s",
    "--seconds",
    "length",
    metavar="TIME",
    help="How long: 25, 25s, 2m.  [default: tracing.window_s, 25]",
)
@click.option("--stacks", is_flag=True, help="With the Python stack of each launch, which costs more.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option(
    "-o", "--output", metavar="FILE", help="Write a Perfetto trace too: FILE.pftrace, or FILE.pftrace.gz."
)
@click.option(
    "--cost",
    metavar="SHARE",
    help="Most of a thread's time to be taken.  [default: tracing.cost_share, 2%]",
)
@click.option(
    "--share",
    metavar="SHARE",
    help="Most of the run that may be traced.  [default: tracing.run_share, 30%]",
)
@click.option(
    "--controller",
    metavar="HOST:PORT",
    help="On all the job's nodes, through this controller.  [default: controller.address]",
)
@click.option("--node", metavar="NAME", help="(with a controller) On this node alone.")
@click.option("--local", is_flag=True, help="On this node, whatever controller.address says.")
@click.option("--socket", metavar="PATH", envvar="EXPANSE_AGENT_SOCKET", help="The agent's Unix socket.")
def command(
    key: str | None,
    named: str | None,
    length: str | None,
    stacks: bool,
    as_json: bool,
    output: str | None,
    cost: str | None,
    share: str | None,
    controller: str | None,
    node: str | None,
    local: bool,
    socket: str | None,
) -> None:
    """Open a window on JOB: for some seconds every CUDA and NCCL call of its processes is seen.

    Nothing is loaded into the job and nothing is left behind. Where a controller is known it opens the
    window on all the job's nodes at the same time; else this node's agent does, for root and for the job's
    owner. Ctrl-C ends the window with what there is, a second one gives it up; through a controller the
    first gives up and the window goes on.

    \b
    The exit code is
      0    when there is a trace, also one that was cut short: stderr says so
      2    for what makes no sense
      3    when there is no such job, or it has no process (no_targets)
      4    when nothing in its processes can be probed (no_probe_point)
      5    when windows have used up what they may, or one is open (budget)
      1    when it failed otherwise
      130  when it was given up
    """
    from expanse_ebpf.wire.collector_pb2 import TraceRequest
    from expanse_ebpf.wire.keys import parse_key

    if (key is None) == (named is None):
        raise ConfigError("give one job's key, as JOB or by --job KEY: slurm/123, run/NAME")
    key = key if key is not None else named or ""
    parse_key(key)
    configured = settings()
    request = TraceRequest(key=key, stacks=stacks, node=node or "")
    if length is not None:
        request.seconds = window_s(length, configured.tracing.max_window_s)
    request.cost_share = share_of_one(cost, "--cost", 0.0001, "2% or 0.02")
    request.run_share = share_of_one(share, "--share", 0.001, "30% or 0.3")
    file = PerfettoFile(output) if output is not None else None
    source = click.get_current_context().get_parameter_source("socket")
    own_socket = source is click.core.ParameterSource.COMMANDLINE
    if controller is not None and (local or own_socket):
        raise ConfigError(f"--controller and {'--local' if local else '--socket'} exclude each other")
    address = "" if local or own_socket else controller or configured.controller.address
    if address:
        config.split_address(address, "--controller")
        windows = _by_controller(address, request)
    else:
        if node is not None:
            raise ConfigError("--node needs --controller HOST:PORT; without one the window is on this node")
        windows = _by_agent(socket or configured.agent.socket, request)
    write(key, windows, file, as_json, address)


def settings() -> config.Config:
    """The configuration; a file that only root may read does not count."""
    there = config.DEFAULT_FILE.exists() and not os.access(config.DEFAULT_FILE, os.R_OK)
    return config.load(Path(os.devnull) if there else None)


def window_s(given: str, most: float) -> float:
    """The length of a window, in seconds; `most` is what is said to be allowed. Raises ConfigError."""
    allowed = f"use {LEAST_S:g} to {most:g} s (tracing.max_window_s): 25, 25s, 2m"
    try:
        length = seconds(given, "--seconds")
    except ConfigError:
        raise ConfigError(f"--seconds: {given[:80]!r} is no length of a window: {allowed}") from None
    if length > MOST_S:
        raise ConfigError(f"--seconds: {given} is longer than any window: {allowed}")
    return length


def share_of_one(given: str | None, flag: str, least: float, example: str) -> float:
    """A share given as "2%" or "0.02"; 0 when none is. Raises ConfigError, with an `example`."""
    if given is None:
        return 0.0
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(%?)", given, re.ASCII)
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not least <= share <= 1:
        raise ConfigError(
            f"{flag}: {given[:80]!r} is not a share between {least * 100:g}% and 100%: use {example}"
        )
    return share


# ---- the window


def _by_agent(path: str, request: TraceRequest) -> Windows:
    from expanse_ebpf.cli import trace_session

    windows = trace_session.Windows()
    with trace_session.ended_early() as early, trace_session.Progress(sys.stderr, "ends it") as progress:
        for reply in trace_session.by_agent(path, request, lambda: early.happened):
            windows.add(reply)
            progress.show(windows)
    return windows


def _by_controller(address: str, request: TraceRequest) -> Windows:
    from expanse_ebpf.cli import trace_session
    from expanse_ebpf.ship import remote

    windows = trace_session.Windows()
    try:
        with trace_session.Progress(sys.stderr, "leaves it, it goes on") as progress:
            for reply in remote.trace(address, request):
                windows.add(reply)
                progress.show(windows)
    except KeyboardInterrupt:
        if windows.id:
            say(
                f"window {windows.id} goes on without this command; later: "
                f"expanse-ebpf traces --window {windows.id} --controller {address}"
            )
        raise
    return windows


# ---- output


def write(title: str, windows: Windows, file: PerfettoFile | None, as_json: bool, address: str = "") -> None:
    """Print what came of a window, and write its trace. Raises what says why there is none.

    `address` is the controller's, empty where none was asked.
    """
    traces, lost = windows.traces()
    summary = failure = None
    if traces:
        from expanse_ebpf.export.trace_summary import Summary

        summary = Summary.of(traces)
        if file is not None:
            try:
                file.write(traces)
            except ExpanseError as error:
                failure = error
    if as_json:
        said = {
            "job": title,
            "window": windows.id or None,
            "nodes": windows.as_json(lost),
            "summary": summary.as_json() if summary is not None else None,
            "file": str(file.path) if file is not None and traces and failure is None else None,
        }
        # DEL, which JSON leaves as it is, steers terminals.
        output = json.dumps(said, indent=2, allow_nan=False).replace("\x7f", "\\u007f")
    else:
        from expanse_ebpf.top import text

        output = "\n".join(map(text.clean, summary.lines(_width()))) if summary is not None else ""
    if output:
        if sys.stdout is None:
            raise UnavailableError("standard output is closed; give trace somewhere to write to")
        encoding = sys.stdout.encoding or "ascii"
        click.echo(output.encode(encoding, "replace").decode(encoding))
    _require(title, windows, lost, address, traced=bool(traces))
    if failure is not None:
        raise failure
    if file is not None:
        say(f"written to {file.path}: open it in https://ui.perfetto.dev")


def _require(title: str, windows: Windows, lost: dict[str, str], address: str, *, traced: bool) -> None:
    """Say what is missing; raise it when that is everything."""
    from expanse_ebpf.cli.trace_session import state_name

    found: dict[str, str] = {}  # by state, what the first node says of it
    for node, status in sorted(windows.statuses.items()):
        state, reason = state_name(status), status.reason
        if node in lost:
            state, reason = "failed", lost[node]
        elif not reason and state in _WITHOUT_TRACE:
            reason = _WITHOUT_TRACE[state][1]
        if reason:
            where = f"{node}: " if node else ""
            found.setdefault(state, where + reason)
            if traced:
                say(f"{where}{state}: {reason}")
    if traced:
        return
    for state, (kind, _, remedy) in _WITHOUT_TRACE.items():
        if state in found:
            remedy = remedy.replace("{through}", f" --controller {address}" if address else "")
            raise kind(f"{title}: no trace: {state}: {found[state]}{remedy and f'; {remedy}'}")
    raise UnavailableError(f"{title}: no trace: nothing was heard of the window; see the agent's log")


def say(line: str) -> None:
    """One line on standard error."""
    from expanse_ebpf.top import text

    if sys.stderr is not None:
        click.echo(text.clean(line), err=True)


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None
