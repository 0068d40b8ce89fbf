"""`expanse-ebpf run`: real cgroups, processes, signals and a terminal."""

from __future__ import annotations

import os
import pty
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import pytest

from expanse_ebpf.jobs import launch
from expanse_ebpf.jobs.adopt import Adoptions
from expanse_ebpf.jobs.hierarchies import mounted
from expanse_ebpf.node_socket import NodeSocket
from expanse_ebpf.wire.collector_pb2 import RunReply
from tests.cli import nobody

COMMAND = [sys.executable, "-c", nobody.MAIN, "run"]


def directories(name: str) -> list[str]:
    """The job's cgroups in any hierarchy, at the top or below our own."""
    component = f"expanse-run-{quote(name, safe='')}"
    parents = {h.mount for h in mounted()}
    parents.update(launch.parents(mounted(), launch.CONTROLLERS, launch.cgroup_of("self")))
    return [path for parent in parents if Path(path := f"{parent}/{component}").is_dir()]


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-run-{uuid4().hex[:12]}"
    yield name
    sweep(name)


def sweep(name: str) -> None:
    launch.signal_all(directories(name), signal.SIGKILL)
    launch.remove(directories(name))


def run(name: str, *cmd: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    argv = [*COMMAND, "--name", name, *options, "--", *cmd]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


@pytest.fixture
def start(name: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `run` with a shell script that says "ready" when its traps are set; wait for that."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str, *options: str) -> subprocess.Popen[str]:
        argv = [*COMMAND, "--name", name, *options, "--", "sh", "-c", script]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("code", [0, 1, 3, 125, 255])
def test_the_exit_code_is_passed_on_and_nothing_is_left(name: str, code: int) -> None:
    done = run(name, "sh", "-c", f"echo out; echo err >&2; exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "out\n", "err\n")
    assert directories(name) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_command_that_a_signal_ended_gives_128_and_more(name: str, number: signal.Signals) -> None:
    assert run(name, "sh", "-c", f"kill -{int(number)} $$").returncode == 128 + number
    assert directories(name) == []


@pytest.mark.parametrize(
    "odd",
    ["two words", "a/b", "../up", ".hidden", "%41", "naïve-日本", "-rf", "*", "a:b", "x" * 200, "$(true)"],
)
def test_any_printable_name_will_do_and_is_one_cgroup(odd: str) -> None:
    try:
        done = run(odd, "cat", "/proc/self/cgroup")
        assert done.returncode == 0, done.stderr
        expected = f"/expanse-run-{quote(odd, safe='')}"
        for line in done.stdout.splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or launch.CONTROLLERS.issuperset(controllers.split(",")):
                assert path == expected
        assert directories(odd) == []
    finally:
        sweep(odd)


@pytest.mark.parametrize("bad", ["", "a\nb", "\x1b[31m", "日" * 60])
def test_a_bad_name_is_one_line(bad: str) -> None:
    done = run(bad, "true")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--name" in done.stderr or "name" in done.stderr


def test_no_name_and_no_command_are_usage_errors() -> None:
    for arguments in (["--", "true"], ["--name", "x"]):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_options_of_the_command_are_the_commands(name: str) -> None:
    argv = [*COMMAND, "--name", name, "echo", "--name", "-n", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stdout == "--name -n --help\n"


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (None, 127, "command not found"),
        ("data", 126, "Permission denied"),
        ("script", 126, "Exec format error"),
        ("folder", 126, "Permission denied"),
    ],
)
def test_a_command_that_cannot_start_is_one_line(
    name: str, tmp_path: Path, make: str | None, code: int, words: str
) -> None:
    path = tmp_path / "it"
    if make == "folder":
        path.mkdir()
    elif make:
        path.write_text("\x01\x02 no program\n")
        path.chmod(0o755 if make == "script" else 0o644)
    done = run(name, str(path))
    assert done.returncode == code
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert directories(name) == []


def test_the_command_is_in_the_job_before_it_runs_and_run_is_not(name: str) -> None:
    done = run(name, "sh", "-c", f"cat {directories_glob(name)}; echo $PPID")
    *pids, parent = done.stdout.split()
    assert parent not in pids
    assert len(set(pids)) >= 1


def directories_glob(name: str) -> str:
    return " ".join(f"{h.mount}/expanse-run-{name}/cgroup.procs" for h in mounted() if h.version == 2)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2],
)
def test_signals_go_on_to_the_command(
    number: signal.Signals, name: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start(f"trap 'echo got; exit 7' {int(number)}; echo ready; while :; do sleep 0.02; done")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (7, "got\n", "")
    assert directories(name) == []


def test_a_command_that_goes_on_after_a_signal_is_waited_for(
    name: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("trap 'echo got' TERM; trap 'exit 4' USR1; echo ready; while :; do sleep 0.02; done")
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "got\n"
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 4


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stop_and_continue_go_on_to_the_command(
    name: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("trap 'exit 5' TERM; echo ready; while :; do read x < /dev/null; done")
    (child,) = launch.pids_of(directories(name))
    process.send_signal(signal.SIGTSTP)
    eventually(lambda: state(child) == "T" and state(process.pid) == "T")
    process.send_signal(signal.SIGCONT)
    eventually(lambda: state(child) != "T" and state(process.pid) != "T")
    process.terminate()
    assert process.wait(30) == 5


def test_a_second_job_of_the_same_name_is_refused(
    name: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("trap 'exit 0' TERM; echo ready; while :; do sleep 0.02; done")
    done = run(name, "true")
    assert done.returncode == 125
    assert "runs already" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    process.terminate()
    assert process.wait(30) == 0
    assert run(name, "true").returncode == 0


def test_a_killed_run_leaves_the_job_alone_and_its_cgroups_to_the_next(
    name: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("echo ready; exec sleep 60")
    process.kill()
    process.wait()
    assert len(launch.pids_of(directories(name))) == 1
    assert run(name, "true").returncode == 125
    launch.signal_all(directories(name), signal.SIGKILL)
    eventually(lambda: not launch.pids_of(directories(name)))
    assert directories(name)
    assert run(name, "true").returncode == 0
    assert directories(name) == []


DAEMON = "setsid sh -c 'trap \"\" HUP; {script}' >/dev/null 2>&1 & exit 6"


def test_what_is_left_behind_is_left_alone(name: str) -> None:
    done = run(name, "sh", "-c", DAEMON.format(script="exec sleep 60"))
    assert done.returncode == 6
    (pid,) = launch.pids_of(directories(name))
    assert str(pid) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert state(pid) == "S"


def test_what_ends_by_itself_soon_is_waited_for(name: str) -> None:
    done = run(name, "sh", "-c", DAEMON.format(script="exec sleep 0.2"))
    assert (done.returncode, done.stderr) == (6, "")
    assert directories(name) == []


@pytest.mark.parametrize("script", ["exec sleep 60", 'trap "" TERM; while :; do sleep 1; done'])
def test_what_is_left_behind_is_killed_on_demand(name: str, script: str) -> None:
    done = run(name, "sh", "-c", DAEMON.format(script=script), options=("--rest", "kill"))
    assert (done.returncode, done.stderr) == (6, "")
    assert directories(name) == []


def test_what_is_left_behind_is_waited_for_on_demand(
    name: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("echo ready; " + DAEMON.format(script="exec sleep 60"), "--rest", "wait")
    assert process.stderr is not None
    assert "waiting for" in process.stderr.readline()
    process.terminate()  # goes to the rest
    assert process.wait(30) == 6
    assert directories(name) == []


def test_cgroups_that_the_command_made_are_removed(name: str) -> None:
    unified = next(h.mount for h in mounted() if h.version == 2)
    done = run(name, "mkdir", "-p", f"{unified}/expanse-run-{name}/a/b")
    assert done.returncode == 0
    assert directories(name) == []


# ---- a terminal


class Terminal:
    """A session of its own, whose leader runs `run` on a pseudo-terminal."""

    def __init__(self, *argv: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.execvp(argv[0], argv)
            finally:
                os._exit(99)
        self.output = ""

    def expect(self, text: str) -> None:
        deadline = time.monotonic() + 30
        with selectors.DefaultSelector() as selector:
            selector.register(self.fd, selectors.EVENT_READ)
            while text not in self.output:
                assert time.monotonic() < deadline, self.output
                if selector.select(0.1):
                    with suppress(OSError):
                        self.output += os.read(self.fd, 4096).decode()

    def press(self, key: bytes) -> None:
        os.write(self.fd, key)

    def wait(self) -> int:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with suppress(OSError):
                os.set_blocking(self.fd, False)
                self.output += (os.read(self.fd, 4096) or b"").decode()
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise AssertionError(self.output)

    def close(self) -> None:
        os.close(self.fd)
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*argv: str) -> Terminal:
        opened.append(Terminal(*argv))
        return opened[-1]

    yield start
    for session in opened:
        session.close()


COUNT = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.3)
print(f"interrupts={len(seen)};", flush=True)
sys.exit(9)
"""


def test_ctrl_c_reaches_the_command_once(name: str, terminal: Callable[..., Terminal]) -> None:
    session = terminal(*COMMAND, "--name", name, "--", sys.executable, "-c", COUNT)
    session.expect("ready")
    session.press(b"\x03")
    session.expect("interrupts=1;")
    assert session.wait() == 9
    assert directories(name) == []


def test_ctrl_z_gives_the_terminal_back_and_fg_goes_on(name: str, terminal: Callable[..., Terminal]) -> None:
    session = terminal("env", "PS1=prompt> ", "bash", "--norc", "--noprofile", "--noediting", "-i")
    session.expect("prompt> ")
    quoted = " ".join(f"'{word}'" for word in COMMAND)
    script = "echo rea''dy; while read x; do echo got-$x; done; exit 3"
    session.press(f"{quoted} --name {name} -- sh -c '{script}'\n".encode())
    session.expect("ready")
    session.press(b"\x1a")
    session.expect("Stopped")
    session.press(b"fg; echo code=$?\n")
    session.press(b"again\n")
    session.expect("got-again")
    session.press(b"\x04")
    session.expect("code=3")
    assert directories(name) == []


def test_in_a_background_group_a_signal_to_the_group_comes_once(
    name: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    argv = [*COMMAND, "--name", name, "--", sys.executable, "-c", COUNT]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "interrupts=1;\n"
    assert process.wait(30) == 9


# ---- without root


def test_without_root_and_without_user_the_remedy_is_named(name: str) -> None:
    done = subprocess.run(
        nobody.argv("run", "--name", name, "--", "true"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 125
    assert len(done.stderr.splitlines()) == 1
    assert "--user" in done.stderr


def test_without_root_and_without_an_agent_the_remedy_is_named(name: str) -> None:
    argv = nobody.argv("run", "--name", name, "--user", "--socket", "/run/no-agent-here", "--", "true")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert "agent" in done.stderr


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A v2 cgroup that belongs to nobody, with one below it."""
    unified = next(h.mount for h in mounted() if h.version == 2)
    top = Path(unified, f"test-delegated-{uuid4().hex[:12]}")
    inner = top / "inner"
    inner.mkdir(parents=True)
    for folder in (top, inner):
        for path in (folder, folder / "cgroup.procs", folder / "cgroup.subtree_control"):
            os.chown(path, nobody.NOBODY, -1)
    yield inner
    launch.signal_all([str(top)], signal.SIGKILL)
    launch.remove([str(top)])


def test_a_user_runs_a_job_in_a_delegated_cgroup(name: str, delegated: Path) -> None:
    argv = nobody.argv("run", "--name", name, "--user", "--", "sh", "-c", "cat /proc/self/cgroup; exit 3")
    enter = f'echo 0 > {delegated}/cgroup.procs && exec "$@"'
    done = subprocess.run(["sh", "-c", enter, "sh", *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert f"0::/{delegated.parent.name}/expanse-run-{name}" in done.stdout.splitlines()
    assert [path.name for path in delegated.parent.iterdir() if path.is_dir()] == ["inner"]


@pytest.fixture
def agent() -> Iterator[tuple[str, Adoptions]]:
    """The agent's end of the socket, in a thread, where everyone may reach it."""
    folder = Path(f"/tmp/test-run-{uuid4().hex[:12]}")
    adoptions = Adoptions()
    selector = selectors.DefaultSelector()

    def on_run(name: str, pid: int, uid: int) -> RunReply:
        return RunReply(cgroup=adoptions.adopt(name, pid, uid)[0])

    server = NodeSocket(str(folder / "agent.sock"), selector, on_run=on_run)
    server.open()
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            for key, mask in selector.select(0.05):
                key.data(mask)

    thread = threading.Thread(target=loop)
    thread.start()
    yield server.path, adoptions
    stop.set()
    thread.join()
    server.close()
    selector.close()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_a_user_runs_a_job_by_the_agent(name: str, agent: tuple[str, Adoptions]) -> None:
    socket, adoptions = agent
    argv = nobody.argv(
        *("run", "--name", name, "--user", "--socket", socket, "--"),
        *("sh", "-c", "cat /proc/self/cgroup; id -u; exit 3"),
    )
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    *lines, uid = done.stdout.splitlines()
    assert uid == str(nobody.NOBODY)
    assert sum(line.endswith(f"/expanse-run-{name}") for line in lines) >= 1
    eventually(lambda: adoptions.remove_empty() == [] and not directories(name))


def test_the_agents_refusal_is_one_line(name: str, agent: tuple[str, Adoptions]) -> None:
    socket, adoptions = agent
    adoptions._max_per_uid = 0
    argv = nobody.argv("run", "--name", name, "--user", "--socket", socket, "--", "true")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "jobs already" in done.stderr
    assert len(done.stderr.splitlines()) == 1
