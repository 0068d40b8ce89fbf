"""What is read of processes, beside what they say of themselves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expanse_ebpf.bench import descriptors, usage

Start = Callable[[str], "Program"]


class Program:
    """A Python program that says a line when it is where it should be, and stays."""

    def __init__(self, source: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", f"{source}\nprint(flush=True)\ninput()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()

    def line(self, text: str = "") -> str:
        """What it says after a line of input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Program] = []

    def one(source: str) -> Program:
        started.append(Program(source))
        return started[-1]

    yield one
    for program in started:
        program.process.kill()
        program.process.communicate()


BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_children_that_have_ended_count(start: Start) -> None:
    program = start(f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {BURN!r}])")
    taken = usage.taken(program.pid)
    assert 0.25 < taken.cpu_s < 5
    assert usage.tree(program.pid) == [program.pid]


def test_children_that_run_count_and_so_do_theirs(start: Start) -> None:
    below = f"import subprocess, sys\n{BURN}\nprint(flush=True)\ninput()"
    spawn = "import subprocess, sys\np = subprocess.Popen([sys.executable, '-S', '-c', {!r}], stdout=-1)"
    program = start(spawn.format(f"{spawn.format(below)}\n{below}") + "\np.stdout.readline()")
    tree = usage.tree(program.pid)
    assert len(tree) == 3
    assert usage.taken(program.pid).cpu_s > 0.25  # the kernel adds up in ticks
    assert usage.tree(program.pid)[0] == program.pid


def test_what_has_gone_has_no_tree_and_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert usage.tree(process.pid) == []
    assert usage.pss_bytes(process.pid) is None
    assert usage.anonymous_bytes([process.pid]) == 0


def test_what_has_ended_and_was_not_waited_for_keeps_its_cpu_time() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", BURN])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert usage.taken(process.pid).cpu_s > 0.25  # the kernel adds up in ticks
        assert usage.pss_bytes(process.pid) is None
    finally:
        process.wait()


def test_anonymous_memory_is_that_and_no_files(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * (24 << 20))
    program = start("x = bytearray(b'x') * (48 << 20)")
    mapped = start(
        f"import mmap\nf = open({str(file)!r}, 'rb')\nm = mmap.mmap(f.fileno(), 0, prot=1)\nsum(m[::4096])"
    )
    assert 48 << 20 <= usage.anonymous_bytes([program.pid]) < 64 << 20
    assert usage.anonymous_bytes([mapped.pid]) < 16 << 20
    both = usage.anonymous_bytes([program.pid, mapped.pid])
    assert both == usage.anonymous_bytes([program.pid]) + usage.anonymous_bytes([mapped.pid])
    pss = usage.pss_bytes(mapped.pid)
    assert pss is not None
    assert pss > 24 << 20


def test_bytes_written_to_a_disk_count(start: Start, tmp_path: Path) -> None:
    if usage.on_memory(tmp_path):
        pytest.skip(f"{tmp_path} lies in memory")
    program = start("")
    before = usage.taken(program.pid).written_bytes
    assert before is not None
    writing = start(
        f"import os\nf = open({str(tmp_path / 'file')!r}, 'wb')\nf.write(b'x' * (1 << 20))\nf.flush()"
    )
    written = usage.taken(writing.pid).written_bytes
    assert written is not None
    assert 1 << 20 <= written - before < 2 << 20


def test_memory_is_no_disk() -> None:
    assert usage.on_memory(Path("/dev/shm"))
    assert not usage.on_memory(Path("/proc"))


def test_a_name_with_brackets_and_spaces_misleads_nobody() -> None:
    stat = f"7 (a) R 1 2 (b) c) S 5 7 7 0 -1 4194560 9 8 7 6 100 {20} 3 4 20 0 1 0 99"
    assert usage.parent_of_stat(stat) == 5
    assert usage.cpu_of_children(stat) == (3 + 4) / os.sysconf("SC_CLK_TCK")
    assert usage.parent_of_stat("") is None
    assert usage.cpu_of_children("") == 0


def test_a_number_is_that_of_its_line() -> None:
    text = "Rss:  12 kB\nPss_Anon: 5 kB\nPss:   7 kB\nusage_usec 90\nuser_usec 4"
    assert usage.number(text, "Pss") == 7
    assert usage.number(text, "usage_usec") == 90
    assert usage.number(text, "Swap") is None


# ---- behind descriptors

CONNECT = """
import socket
connection = socket.create_connection(("127.0.0.1", {port}))
print(flush=True)
while said := input():
    if said == "close": connection.close()
    else: connection.sendall(b"x" * int(said))
    print(flush=True)
"""


def test_bytes_sent_are_those_of_the_other_process(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = start(CONNECT.format(port=server.getsockname()[1]))
        taker, _ = server.accept()
        with taker:
            before = descriptors.sent_bytes([program.pid])
            assert list(before.values()) == [0]
            program.line("5000")
            program.line("41")
            after = descriptors.sent_bytes([program.pid])
            assert descriptors.sent_between(before, after) == 5041
            assert descriptors.sent_between({}, after) == 5041
            program.line("close")
            assert descriptors.sent_between(before, descriptors.sent_bytes([program.pid])) is None


def test_a_process_without_connections_has_sent_nothing_and_one_that_has_gone_neither(start: Start) -> None:
    program = start("import socket\na, b = socket.socketpair()\na.sendall(b'x')\nu = socket.socket(type=2)")
    assert descriptors.sent_bytes([program.pid]) == {}
    assert descriptors.probes([program.pid]) == 0
    program.process.kill()
    program.process.wait()
    assert descriptors.sent_bytes([program.pid]) == {}


def test_cpu_time_is_told_to_less_than_a_tick() -> None:
    before = [(usage.cpu_of_clock(os.getpid()), time.process_time()) for _ in range(50)]
    assert len({told for told, _ in before}) == 50
    assert all(told <= own for told, own in before)
    assert before == sorted(before)
    assert usage.cpu_of_clock(2**22 + 1) == 0
