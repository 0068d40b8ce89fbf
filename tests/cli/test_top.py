"""`expanse-ebpf top` as people start it: in pipes, terminals of all kinds, and without any."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expanse_ebpf.wire.collector_pb2 import NodeSnapshot
from tests.top.gpu_reports import MIG, UUIDS, gpu_report
from tests.top.serving import ServedNode, make_report

COMMAND = [sys.executable, "-c", "from expanse_ebpf.cli import main; main()", "top"]


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    """A node that makes a report ten times a second."""
    path = str(tmp_path / "agent.sock")
    end = threading.Event()

    def publish() -> None:
        sequence = 3
        while not end.wait(0.1):
            node.publish(make_report(sequence, interval_s=0.1))
            sequence += 1

    with ServedNode(path) as node:
        for sequence in (1, 2):
            node.publish(make_report(sequence, interval_s=0.1))
        thread = threading.Thread(target=publish)
        thread.start()
        yield path
        end.set()
        thread.join(10)


def environment(**changes: str | None) -> dict[str, str]:
    values = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **changes}
    return {name: value for name, value in values.items() if value is not None}


def run(
    *arguments: str, stdin: int | None = subprocess.DEVNULL, **changes: str | None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments], stdin=stdin, capture_output=True, timeout=60, env=environment(**changes)
    )


class Terminal:
    """A pseudo-terminal with `top` in it."""

    def __init__(self, arguments: list[str], size: tuple[int, int], **changes: str | None) -> None:
        self.master, slave = pty.openpty()
        self.resize(*size)
        self.output = b""
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.before = termios.tcgetattr(slave)
        self.slave = slave

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds: float = 0.05) -> None:
        while select.select([self.master], [], [], seconds)[0]:
            self.output += os.read(self.master, 65536)
            seconds = 0

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.output[-2000:]
            assert self.process.poll() is None, self.output[-2000:]
            self.read()

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait(self) -> int:
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output[-2000:]
            self.read()
        self.read()
        return self.process.returncode


@pytest.fixture
def terminal(socket: str) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, size: tuple[int, int] = (120, 30), **changes: str | None) -> Terminal:
        opened.append(Terminal(["--socket", socket, *arguments], size, **changes))
        return opened[-1]

    yield start
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.master)
        os.close(one.slave)


# ---- one snapshot


def test_once_json(socket: str) -> None:
    result = run("--once", "--json", "--socket", socket)
    assert (result.returncode, result.stderr) == (0, b"")
    snapshot = json.loads(result.stdout)
    assert snapshot["node"] == "gpu017"
    assert [job["key"] for job in snapshot["jobs"]] == ["slurm/4411", "slurm/4412", "slurm/4413"]
    assert all(job["cpu_cores"] > 0 for job in snapshot["jobs"])
    assert snapshot["collector"]["bpf"]["ns_per_s"] > 0
    assert result.stdout.isascii()


def test_once_of_an_agent_with_a_single_report_has_no_rates(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with ServedNode(path) as node:
        node.publish(make_report(1))
        snapshot = json.loads(run("--once", "--json", "--socket", path).stdout)
    assert snapshot["jobs"][0]["cpu_cores"] is None
    assert snapshot["jobs"][0]["memory_bytes"] == 700 << 20


def test_a_pipe_gets_one_table(socket: str) -> None:
    result = run("--socket", socket)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode().count("JOB ") == 1
    assert "обучение модели" in result.stdout.decode()


@pytest.mark.parametrize("arguments", [["--ascii"], []])
def test_ascii_where_the_locale_knows_no_more(socket: str, arguments: list[str]) -> None:
    changes = {} if arguments else {"LC_ALL": "C"}
    result = run("--socket", socket, *arguments, **changes)
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert b"slurm/4413  ???????? ??????  user2" in result.stdout


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_closed_descriptors(socket: str, closed: str) -> None:
    redirections = " ".join(f"{fd}>&-" for fd in closed.split())
    script = f'"$@" {redirections}'
    result = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "--socket", socket],
        capture_output=True,
        timeout=60,
        env=environment(),
    )
    assert b"Traceback" not in result.stderr
    if "1" in closed:
        assert result.returncode == 1
        assert "2" in closed or result.stderr.startswith(b"error: standard output is closed")
    else:
        assert result.returncode == 0
        assert b"slurm/4411" in result.stdout


@pytest.mark.parametrize("term", [None, "", "dumb", "no-such-terminal"])
def test_any_term_in_a_pipe(socket: str, term: str | None) -> None:
    assert run("--socket", socket, TERM=term).returncode == 0


def test_a_full_disk_is_no_silent_success(socket: str) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*COMMAND, "--once", "--socket", socket], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert result.returncode != 0


# ---- --job


def test_job_selects(socket: str) -> None:
    result = run("--once", "--json", "--job", "slurm/4412", "--job", "slurm/4413", "--socket", socket)
    assert [job["id"] for job in json.loads(result.stdout)["jobs"]] == ["4412", "4413"]


def test_unknown_job(socket: str) -> None:
    result = run("--once", "--job", "slurm/99", "--socket", socket)
    assert (result.returncode, result.stdout) == (3, b"")
    assert result.stderr.decode() == (
        f"error: no job slurm/99 at {socket}; `expanse-ebpf top --once` lists those there are\n"
    )


def test_malformed_job_key_is_told_before_anything_else() -> None:
    result = run("--once", "--job", "99", "--socket", "/nonexistent")
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: '99' is not a job's key")


# ---- GPUs


@pytest.fixture
def gpu_socket(tmp_path: Path) -> Iterator[str]:
    """A node with GPUs that has made two reports."""
    path = str(tmp_path / "gpus.sock")
    with ServedNode(path) as node:
        for sequence in (1, 2):
            node.publish(gpu_report(sequence))
        yield path


def test_gpus_in_a_table(gpu_socket: str) -> None:
    result = run("--once", "--gpus", "--socket", gpu_socket)
    assert (result.returncode, result.stderr) == (0, b"")
    lines = result.stdout.decode().splitlines()
    assert lines[2].startswith("GPU  ")
    assert [line[:18].strip() for line in lines[3:10]] == [
        *(f"{i} GPU-{i}a6b7c8d" for i in range(4)),
        *("3/7 MIG-aaaaaaaa", "3/8 MIG-bbbbbbbb", "4 GPU-4a6b7c8d"),
    ]
    assert run("--gpus", "--ascii", "--socket", gpu_socket).stdout.isascii()


def test_gpus_on_a_node_without_any(socket: str) -> None:
    result = run("--once", "--gpus", "--socket", socket)
    assert result.returncode == 0
    assert b"no GPU figures: no NVIDIA driver on this node" in result.stdout


def test_gpus_in_json(gpu_socket: str) -> None:
    snapshot = json.loads(run("--once", "--json", "--socket", gpu_socket).stdout)
    assert [gpu["uuid"] for gpu in snapshot["gpus"]] == [*UUIDS, *MIG]
    assert [event["kind"] for event in snapshot["gpu_events"]] == ["xid"]
    assert snapshot["nvml"]["driver_version"] == "580.65.06"
    assert snapshot["jobs"][0]["gpu"]["gpus_busy"] == pytest.approx(1.35)


@pytest.mark.parametrize(
    ("key", "uuids", "events"),
    [
        ("slurm/4411", UUIDS[:2], 0),
        ("slurm/4412", UUIDS[2:3], 1),
        ("slurm/4413", (UUIDS[3], MIG[0]), 0),  # the instance, and the GPU whose power it takes
    ],
)
def test_job_keeps_only_its_gpus(gpu_socket: str, key: str, uuids: tuple[str, ...], events: int) -> None:
    snapshot = json.loads(run("--once", "--json", "--job", key, "--socket", gpu_socket).stdout)
    assert [gpu["uuid"] for gpu in snapshot["gpus"]] == list(uuids)
    assert len(snapshot["gpu_events"]) == events


def test_gpus_and_json_exclude_each_other(gpu_socket: str) -> None:
    result = run("--json", "--gpus", "--socket", gpu_socket)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"error: --gpus chooses the table; leave it out")


def test_events_of_reports_that_are_passed_over_are_not_lost(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with ServedNode(path) as node:
        for sequence in (1, 2):
            node.publish(gpu_report(sequence))
        process = subprocess.Popen(
            [*COMMAND, "--json", "--every", "1.5", "--count", "2", "--socket", path],
            stdout=subprocess.PIPE,
            env=environment(),
        )
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        sequence = 2
        while process.poll() is None:
            sequence += 1
            node.publish(gpu_report(sequence, interval_s=0.1))
            time.sleep(0.1)
        with process.stdout:
            second = json.loads(process.stdout.readline())
    assert len(first["gpu_events"]) == 1
    assert len(second["gpu_events"]) == second["sequence"] - first["sequence"] > 5


def test_the_live_view_can_begin_with_the_gpus(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with ServedNode(path) as node:
        for sequence in (1, 2):
            node.publish(gpu_report(sequence))
        one = Terminal(["--socket", path, "--gpus"], (80, 24))
        try:
            one.until(lambda: b"MIG-bbbbbbbb" in one.output)
            assert b"slurm/4413" in one.output  # who holds an instance
            one.press(b"g")
            one.until(lambda: b"held idle" in one.output)
            one.press(b"q")
            assert one.wait() == 0
        finally:
            one.process.kill()
            one.process.wait()
            os.close(one.master)
            os.close(one.slave)


# ---- other bad input


def test_no_agent() -> None:
    result = run("--once", "--json", "--socket", "/nonexistent/agent.sock")
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.startswith(b"error: no agent answers on /nonexistent/agent.sock: start it with")
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--node", "gpu1"], b"error: --node needs --controller HOST:PORT"),
        (["--controller", "gpu1"], b"error: --controller: 'gpu1' is not HOST:PORT"),
        (["--gpus", "--sort", "cpu"], b"error: --sort is for jobs; leave it out with --gpus"),
        (["--controller", "h:1", "--socket", "/x"], b"error: --socket and --controller exclude each other"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], line: bytes) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(line)


def test_the_socket_comes_from_the_environment_and_the_flag_wins(socket: str) -> None:
    assert run("--once", EXPANSE_AGENT_SOCKET=socket).returncode == 0
    assert b"/elsewhere" in run("--once", "--socket", "/elsewhere", EXPANSE_AGENT_SOCKET=socket).stderr


# ---- streams


def test_json_lines(socket: str) -> None:
    result = run("--json", "--count", "4", "--socket", socket)
    assert result.returncode == 0
    snapshots = [json.loads(line) for line in result.stdout.splitlines()]
    sequences = [s["sequence"] for s in snapshots]
    assert len(sequences) == 4
    assert sequences == sorted(set(sequences))


def test_every_gives_rates_over_all_the_time_in_between(socket: str) -> None:
    result = run("--json", "--every", "0.5", "--count", "2", "--socket", socket)
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert second["sequence"] - first["sequence"] > 1
    assert second["interval_s"] == pytest.approx(0.1 * (second["sequence"] - first["sequence"]), rel=1)
    assert second["jobs"][0]["counters"]["page_faults_per_s"] is not None


def test_an_agent_that_ends_ends_a_stream_with_its_reason(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with ServedNode(path) as node:
        for sequence in (1, 2):
            node.publish(make_report(sequence))
        process = subprocess.Popen(
            [*COMMAND, "--json", "--socket", path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["sequence"] == 2
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert error.startswith(b"error: the agent on")


def test_ctrl_c_in_a_stream_is_quiet(socket: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--json", "--socket", socket],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, b"")


def test_a_reader_that_has_enough_ends_a_stream_quietly(socket: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--json", "--socket", socket],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 0
    with process.stderr:
        assert process.stderr.read() == b""


# ---- terminals


@pytest.mark.parametrize("size", [(120, 30), (20, 5), (80, 24)])
def test_live_view(terminal: Callable[..., Terminal], size: tuple[int, int]) -> None:
    t = terminal(size=size)
    t.until(lambda: b"gpu017" in t.output)
    t.press(b"\r")  # a panel
    t.until(lambda: b"COMMAND" in t.output or size[1] < 24)
    t.press(b"?")
    t.until(lambda: b"Order of jobs" in t.output or size[1] < 24)
    t.press(b"?/x")  # help is closed, a filter begins
    t.press(b"\x03")
    assert t.wait() == 0
    assert b"\x1b[?1049l" in t.output  # the screen is given back
    assert termios.tcgetattr(t.slave) == t.before
    assert b"Traceback" not in t.output


def test_q_ends_the_live_view(terminal: Callable[..., Terminal]) -> None:
    t = terminal()
    t.until(lambda: b"slurm/4413" in t.output)
    t.press(b"q")
    assert t.wait() == 0


def test_sigterm_gives_the_terminal_back(terminal: Callable[..., Terminal]) -> None:
    t = terminal()
    t.until(lambda: b"slurm/4413" in t.output)
    t.process.send_signal(signal.SIGTERM)
    t.wait()
    assert b"\x1b[?1049l" in t.output
    assert termios.tcgetattr(t.slave) == t.before


def test_a_storm_of_resizes(terminal: Callable[..., Terminal]) -> None:
    t = terminal()
    t.until(lambda: b"slurm/4413" in t.output)
    for i in range(100):
        t.resize(20 + i, 5 + i % 30)  # the kernel sends SIGWINCH
        t.process.send_signal(signal.SIGWINCH)
        t.read(0.005)
    t.resize(120, 30)
    t.output = b""
    t.until(lambda: b"gpu017" in t.output)
    t.press(b"q")
    assert t.wait() == 0
    assert b"Traceback" not in t.output


@pytest.mark.parametrize(
    "changes",
    [{"TERM": None}, {"TERM": "dumb"}, {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}],
)
def test_terminals_that_can_do_little_get_plain_tables(
    terminal: Callable[..., Terminal], changes: dict[str, str | None]
) -> None:
    t = terminal(size=(100, 20), **changes)
    t.until(lambda: t.output.count(b"collector ") >= 3)  # table after table
    t.press(b"q")
    assert t.wait() == 0
    assert b"\x1b" not in t.output
    assert "LC_ALL" not in changes or t.output.isascii()
    assert all(len(line) <= 100 for line in t.output.decode().splitlines())
    assert termios.tcgetattr(t.slave) == t.before


def test_ctrl_c_is_a_common_way_to_end_plain_tables(terminal: Callable[..., Terminal]) -> None:
    t = terminal(TERM="dumb")
    t.until(lambda: b"collector " in t.output)
    t.press(b"\x03")
    assert t.wait() == 0
    assert b"Traceback" not in t.output
    assert termios.tcgetattr(t.slave) == t.before


def test_an_unknown_job_on_a_terminal(terminal: Callable[..., Terminal]) -> None:
    t = terminal("--job", "slurm/99")
    assert t.wait() == 3
    assert b"error: no job slurm/99" in t.output


# ---- through a controller


def test_remote_view(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from expanse_ebpf import cli
    from expanse_ebpf.ship import remote

    def node(name: str, sequence: int) -> NodeSnapshot:
        pair = NodeSnapshot(previous=make_report(sequence - 1), current=make_report(sequence))
        pair.previous.node.name = pair.current.node.name = name
        pair.received_ns = time.time_ns()
        return pair

    known = {"gpu017": node("gpu017", 8), "gpu018": node("gpu018", 5)}

    def ask(_address: str, name: str = "", timeout: float = 3) -> list[NodeSnapshot]:
        return [pair for key, pair in known.items() if name in ("", key)]

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["top", "--once", "--json", "--controller", "head:7443", *arguments])
        code = ended.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    monkeypatch.setattr(remote, "snapshot", ask)
    monkeypatch.setattr(remote, "watch", lambda address, name="", timeout=3: iter(ask(address, name)))
    code, out, _ = call("--node", "gpu018")
    snapshot = json.loads(out)
    assert (code, snapshot["node"], snapshot["sequence"]) == (0, "gpu018", 5)
    assert snapshot["jobs"][0]["cpu_cores"] > 0
    code, _, error = call()
    assert code == 1
    assert error == "error: controller head:7443 has 2 nodes: choose one with --node: gpu017, gpu018\n"
    del known["gpu018"]
    assert json.loads(call()[1])["node"] == "gpu017"
    known.clear()
    assert call()[2].startswith("error: controller head:7443 has no node; start an agent with --controller")


def test_an_unreachable_controller_is_one_line() -> None:
    result = run("--once", "--controller", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: controller 127.0.0.1:1 cannot be reached")
    assert result.stderr.count(b"\n") == 1
