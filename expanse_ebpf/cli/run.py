"""`expanse-ebpf run`: start a command as a job of its own."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

import click

from expanse_ebpf.errors import ExpanseError, UnavailableError
from expanse_ebpf.jobs import launch, paths
from expanse_ebpf.jobs.launch import LaunchError

GRACE_S = 1.0  # for what CMD leaves behind to end by itself
KILL_S = 5.0  # between SIGTERM and SIGKILL with --rest kill

FORWARDED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_WATCHED = FORWARDED | {signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT}


class CommandError(LaunchError):
    """The command itself cannot be executed; exit code as in a shell."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Place(Protocol):
    """Where the job's processes are."""

    directories: list[str]

    def join(self) -> None:
        """Called in the child, which becomes the command; raises ExpanseError."""

    def discard(self, settle_s: float = 0) -> list[str]:
        """Remove the cgroups; those that are still there after `settle_s` seconds."""

    def close(self) -> None:
        """Leave them to the processes in them."""


class AgentPlace:
    """A cgroup that the node's agent makes when the child asks for it."""

    def __init__(self, socket: str, name: str) -> None:
        # Imported before the fork: the child should do as little as it can.
        from expanse_ebpf.top import client
        from expanse_ebpf.wire.collector_pb2 import NodeRequest, RunRequest

        paths.run_component(name)
        self.directories: list[str] = []
        self._ask = functools.partial(client.ask, socket, NodeRequest(run=RunRequest(name=name)))

    def join(self) -> None:
        """Ask the agent, which knows the process by the socket's credentials and moves it."""
        try:
            self.directories = [self._ask().run.cgroup]
        except UnavailableError as error:
            raise launch.LaunchError(str(error)) from None

    def discard(self, settle_s: float = 0) -> list[str]:
        """Nothing: the agent removes what it made."""
        return []

    def close(self) -> None:
        """Nothing: the agent removes what it made."""


@click.command(
    name="run",
    short_help="Start a command as a job of its own.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--name", required=True, help="The job's name: its key is run/NAME. Printable characters.")
@click.option(
    "--user",
    is_flag=True,
    help="Without root: in a cgroup v2 that is delegated to you, else in one that the node's agent makes.",
)
@click.option(
    "--rest",
    type=click.Choice(["leave", "wait", "kill"]),
    default="leave",
    show_default=True,
    help="What to do with processes that CMD leaves behind, one second after it has ended.",
)
@click.option(
    "--socket", metavar="PATH", envvar="EXPANSE_AGENT_SOCKET", help="The agent's Unix socket, for --user."
)
@click.argument("cmd", nargs=-1, type=click.UNPROCESSED, required=True)
def command(name: str, user: bool, rest: str, socket: str | None, cmd: tuple[str, ...]) -> None:
    """Start CMD in a cgroup of its own, as the job run/NAME.

    Signals go on to CMD, and its exit code becomes this command's: 128 + N when signal N ended it, 127
    when it is not found, 126 when it cannot be executed, 125 when no cgroup can be had.

    The job lasts as long as one of its processes. What CMD leaves behind (a daemon, say) is left alone:
    it stays the job run/NAME, and its empty cgroup is removed by the agent or by the next `run`.
    `--rest wait` stays until all have ended and passes signals on to them; `--rest kill` ends them,
    first by SIGTERM, 5 s later by SIGKILL.

    \b
    Examples:
      expanse-ebpf run --name train -- python train.py --epochs 3
      expanse-ebpf run --name sweep --rest kill -- ./sweep.sh
      expanse-ebpf run --user --name mine -- make -j4
    """
    place = _place(name, user, socket)
    sys.exit(_supervise(place, name, cmd, rest))


def _place(name: str, user: bool, socket: str | None) -> Place:
    if not user or os.geteuid() == 0:
        return launch.for_root(name)
    delegated = launch.for_delegate(name)
    if delegated is not None:
        return delegated
    if socket is None:
        from expanse_ebpf import config

        socket = config.load().agent.socket
    return AgentPlace(socket, name)


# ---- the child


def _foreground() -> bool:
    """Whether this process group has the terminal, so that Ctrl-C goes to all of it."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _start(place: Place, cmd: tuple[str, ...], own_group: bool, mask: Iterable[int]) -> int:
    """Fork, join, exec; the child's pid. Raises ExpanseError when it did not become the command."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become(place, cmd, own_group, mask, writer)
    os.close(writer)
    if own_group:
        # In both, since either may come first: a signal that is passed on at once must find the group.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
    with open(reader, "rb") as file:  # ends when exec closes the other end
        directory, _, failure = file.read().partition(b"\0")
    if directory:
        place.directories = place.directories or [os.fsdecode(directory)]
    if failure:
        os.waitpid(pid, 0)
        code, _, message = failure.decode(errors="replace").partition(" ")
        raise CommandError(message, int(code))
    return pid


def _switch_away() -> None:
    """Leave the CPU for a moment.

    The scheduler hook sees the new cgroup at the next switch: what runs until then counts as the former
    job's. A sleep that is over before the CPU could be given away is no switch.
    """
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    while resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw == before:
        time.sleep(1e-4)


def _become(
    place: Place, cmd: tuple[str, ...], own_group: bool, mask: Iterable[int], writer: int
) -> NoReturn:
    """In the child: join the job and become the command. Tells `writer` the cgroup, and what fails."""
    try:
        if own_group:
            os.setpgid(0, 0)
        # What Python set for itself; what our own parent had ignored stays ignored.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        place.join()
        _switch_away()
        os.write(writer, os.fsencode(place.directories[0]) + b"\0")
        os.execvp(cmd[0], cmd)
    except ExpanseError as error:
        _tell(writer, b"\0", error.exit_code, str(error))
    except FileNotFoundError:
        _tell(writer, b"", 127, f"{cmd[0]}: command not found; check its name and PATH")
    except OSError as error:
        why = os.strerror(error.errno or errno.EIO)
        _tell(writer, b"", 126, f"{cmd[0]}: cannot be executed: {why}; check its mode and format")
    finally:
        os._exit(126)


def _tell(writer: int, start: bytes, code: int, message: str) -> None:
    os.write(writer, start + f"{code} {message}".encode(errors="replace"))


# ---- the parent


def _supervise(place: Place, name: str, cmd: tuple[str, ...], rest: str) -> int:
    """Run the command to its end; its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where our parent ignores it, no child could be waited for
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    own_group = not _foreground()
    try:
        pid = _start(place, cmd, own_group, mask)
    except ExpanseError:
        place.discard()
        raise
    status = _watch(pid, own_group)
    _finish(place, name, rest)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _watch(pid: int, own_group: bool) -> int:
    """Pass signals on until the child has ended; its wait status.

    The terminal sends its signals to the whole foreground group, of which the child is one unless it
    has its own: there they must not come twice.
    """
    while True:
        info = signal.sigwaitinfo(_WATCHED)
        number = signal.Signals(info.si_signo)
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if ended and not os.WIFSTOPPED(status):
                return status
            if ended and os.WSTOPSIG(status) in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
                os.kill(os.getpid(), signal.SIGSTOP)  # so that the shell gets its terminal back
            continue
        from_terminal = info.si_code > 0  # the kernel's own; kill() and the like have 0 or less
        with contextlib.suppress(ProcessLookupError):
            if not from_terminal:
                os.kill(pid, number)
            elif own_group:
                os.killpg(pid, number)
                if number in _ENDING:
                    os.killpg(pid, signal.SIGCONT)  # it may have stopped for want of the terminal


def _settle(directories: Sequence[str], seconds: float, pass_on: bool = False) -> set[int]:
    """Wait until no process is in the job, at most so long; those that are left."""
    deadline = time.monotonic() + seconds
    pause = 0.005
    while (left := launch.pids_of(directories)) and time.monotonic() < deadline:
        if pass_on:
            info = signal.sigtimedwait(FORWARDED, pause)
            if info is not None:
                launch.signal_all(directories, signal.Signals(info.si_signo))
        else:
            time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return left


def _finish(place: Place, name: str, rest: str) -> None:
    """Deal with what the command left behind, and remove the job's cgroups."""
    left = _settle(place.directories, GRACE_S)
    if left and rest == "wait":
        _note(f"waiting for what it left behind in run/{name}: {_pids(left)}")
        left = _settle(place.directories, float("inf"), pass_on=True)
    elif left and rest == "kill":
        launch.signal_all(place.directories, signal.SIGTERM)
        launch.signal_all(place.directories, signal.SIGCONT)
        deadline = time.monotonic() + 2 * KILL_S
        left = _settle(place.directories, KILL_S)
        while left and time.monotonic() < deadline:  # some may be forking still
            launch.signal_all(place.directories, signal.SIGKILL)
            left = _settle(place.directories, 0.1)
    if left:
        _note(
            f"the job run/{name} goes on with what it left behind: {_pids(left)}; --rest kill would end them"
        )
        place.close()
    elif still := place.discard(launch.SETTLE_S):
        _note(f"the job's cgroup {still[0]} cannot be removed yet; the next `run` will do so")


def _pids(pids: Iterable[int]) -> str:
    shown = sorted(pids)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"pid{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown[:8]))}{more}"


def _note(message: str) -> None:
    with contextlib.suppress(OSError):  # stderr may have been closed under us
        click.echo(f"expanse-ebpf run: {message}", err=True)
