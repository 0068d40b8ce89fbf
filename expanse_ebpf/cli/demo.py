"""expanse-ebpf demo: everything at once on this machine, to see what it is like."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click

from expanse_ebpf.errors import ConfigError, UnavailableError

_START_S = 30
_SNAPSHOT_S = 5
_READING_S = 4
_ME = (sys.executable, "-m", "expanse_ebpf")


@click.command("demo")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    envvar="DEMO_SECONDS",
    default=60,
    show_default=True,
    help="How long, where there is no terminal (also DEMO_SECONDS). On a terminal: until q.",
)
def command(seconds: float) -> None:
    """Start an agent, a controller and a small training job, and show them in `top`.

    Everything is private to the demo (store, socket, job) and gone afterwards.

    \b
    Examples:
      expanse-ebpf demo
      DEMO_SECONDS=20 expanse-ebpf demo | cat
    """
    if os.geteuid() != 0:
        raise ConfigError("the demo loads BPF programs and makes a cgroup: run it as root")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expanse-demo-")))
        socket, log, job_log = folder / "agent.sock", folder / "agent.log", folder / "training.log"
        options = ["--socket", str(socket), "--state-dir", str(folder), "--db", str(folder / "reports.db")]
        agent = _start(stack, [*_ME, "agent", "--standalone", *options], log)
        _wait_for(socket, agent, log)
        name = f"demo-training-{os.getpid()}"
        click.echo(f"agent and controller run (pid {agent.pid}); starting the job run/{name}")
        training = [sys.executable, "-m", "expanse_ebpf.cli.demo_training", str(folder)]
        job = _start(stack, [*_ME, "run", "--name", name, "--", *training], job_log)
        click.echo(f"the agent's socket is {socket}; in another terminal, while this runs:")
        click.echo(f"  {_my_name()} profile --socket {socket} --job run/{name} -o demo.html")
        top = [*_ME, "top", "--socket", str(socket)]
        if sys.stdin.isatty() and sys.stdout.isatty():
            click.echo(f"`top` comes in {_READING_S} s, q ends it")
            time.sleep(_READING_S)  # it covers the lines above
            shown = subprocess.run(top, check=False)
        else:
            count = math.ceil(seconds / _SNAPSHOT_S) + 1  # the first comes at once
            shown = subprocess.run([*top, "--every", str(_SNAPSHOT_S), "--count", str(count)], check=False)
        for process, what, output in ((agent, "agent", log), (job, "training job", job_log)):
            if process.poll() is not None:
                raise UnavailableError(f"the {what} ended early: {_last_line(output)}")
    if shown.returncode != 0:
        raise UnavailableError(f"`top` ended with exit code {shown.returncode}; its own message is above")
    click.echo("demo over: agent, controller and job have ended, nothing is left")


def _my_name() -> str:
    """What a person types to run this program: it need not be on the PATH."""
    program = Path(sys.argv[0])
    if program.name != "expanse-ebpf":
        return shlex.join(_ME)
    return program.name if shutil.which(program.name) else shlex.quote(str(program.resolve()))


def _start(stack: ExitStack, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A child whose end comes with the demo's, Ctrl-C included."""
    output = stack.enter_context(log.open("wb"))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def end() -> None:
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    stack.callback(end)
    return child


def _wait_for(socket: Path, agent: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not socket.exists():
        if agent.poll() is not None:
            raise UnavailableError(f"the agent did not start: {_last_line(log)}")
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the agent did not open its socket within {_START_S} s: {_last_line(log)}"
            )
        time.sleep(0.05)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
