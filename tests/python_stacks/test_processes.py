"""Processes and jobs that come, change, hide, mislead and go, sampled by the real sampler."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.python_stacks import sampler
from expanse_ebpf.python_stacks.interpreter import Reason
from expanse_ebpf.python_stacks.layouts import for_version
from tests.guests.inside.truth import usage_ns
from tests.python_stacks import interpreters, programs
from tests.python_stacks.driver import (
    Driver,
    Jobs,
    Program,
    driving,
    jobs_of_a_node,
    leaves,
    names,
)
from tests.python_stacks.interpreters import Interp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
SYSTEM = "/usr/bin/python3"


def here(*wanted: str) -> Interp:
    """The first of these interpreters that this machine has; the tests make the last of them."""
    names = interpreters.names()
    return interpreters.interpreter(next(name for name in wanted if name in names))


def of_the_table() -> Interp:
    """One whose layout comes from a table."""
    return here("3.12 pyenv", "3.11 pyenv", "3.11 system")


def of_debug_offsets() -> Interp:
    """One that says itself where things are."""
    return here("3.13 pyenv", "free-threaded")


def shown(interp: Interp) -> str:
    """Its version as stacks have it."""
    return f"3.{interp.minor}{'t' if interp.free_threaded else ''}"


SPIN = "import time\nprint('ready', flush=True)\ndef {0}():\n while time.monotonic() < end: pass\n"
SPIN += "end = time.monotonic() + {1}\n{0}()\n"


@pytest.fixture
def driver() -> Iterator[Driver]:
    with driving() as made:
        yield made


@pytest.fixture
def node() -> Iterator[tuple[Jobs, Driver]]:
    with jobs_of_a_node() as made:
        yield made


def spinning(name: str, seconds: float = 120, python: str = SYSTEM) -> list[str]:
    """The command of a program that spins in the function of that name."""
    return [python, "-c", SPIN.format(name, seconds)]


def enough(driver: Driver, *programs: Program, samples: int = 30) -> None:
    """Go on until each has been seen so many times."""
    pids = [program.pid for program in programs]
    assert driver.run(30, lambda: all(driver.running[pid] >= samples for pid in pids)), driver.samples


def compiled(source: str, into: Path, *options: str) -> Path:
    subprocess.run(["gcc", "-O1", "-pthread", *options, str(HERE / source), "-o", str(into)], check=True)
    return into


# ---- which program it is


@pytest.mark.parametrize("name", ["py th;on3", "trainer"])
def test_an_interpreter_that_was_renamed_and_is_gone(name: str, tmp_path: Path, driver: Driver) -> None:
    binary = tmp_path / name
    shutil.copy(Path(SYSTEM).resolve(), binary)
    program = driver.start(spinning("spin", python=str(binary)), environment={"PYTHONHOME": "/usr"})
    binary.unlink()
    driver.until_ready()
    driver.forget()
    enough(driver, program)
    assert str(Path(f"/proc/{program.pid}/exe").readlink()) == f"{binary} (deleted)"
    assert {(names(stack), stack.python) for stack in driver.seen(program.pid)} == {
        (("<module>", "spin"), f"3.{interpreters.interpreter('3.11 system').minor}")
    }


def test_a_static_interpreter_that_was_copied(tmp_path: Path, driver: Driver) -> None:
    musl = interpreters.interpreter("musl")
    original = Path(musl.command[0])
    binary = tmp_path / "model server"
    shutil.copy(original, binary)
    library = {"PYTHONHOME": str(original.parent), "PYTHONPATH": str(original.parent / "Lib")}
    program = driver.start(spinning("spin", python=str(binary)), environment=library)
    driver.until_ready()
    driver.forget()
    enough(driver, program)
    assert {names(stack) for stack in driver.seen(program.pid)} == {("<module>", "spin")}


def test_programs_that_follow_one_another_in_one_process(driver: Driver, tmp_path: Path) -> None:
    """The shell, one interpreter and another one, in one pid: no name of one is seen in the next."""
    versions = [of_the_table(), of_debug_offsets()]
    first, second = map(shown, versions)
    (tmp_path / "second.py").write_text(SPIN.format("second", 120))
    then = f"import os\nos.execv({versions[1].command[0]!r}, ['python', {str(tmp_path / 'second.py')!r}])\n"
    (tmp_path / "first.py").write_text(SPIN.format("first", 2) + then)
    script = (
        "echo ready; end=$((SECONDS+2)); while ((SECONDS<end)); do :; done; "
        f"exec {versions[0].command[0]} {tmp_path / 'first.py'}"
    )
    program = driver.start(["bash", "-c", script])
    driver.until_ready()
    assert driver.run(30, lambda: len(program.lines()) == 2)
    driver.drain()
    assert {stack.python for stack in driver.seen()} <= {first}
    assert driver.unresolved()["not_python"] > 10
    assert driver.run(30, lambda: len(program.lines()) == 3)
    enough(driver, program, samples=driver.running[program.pid] + 30)
    own = {"first": first, "second": second}
    for stack in driver.seen():
        for name, python in own.items():
            assert name not in names(stack) or stack.python == python
    assert leaves(driver.seen())["first"] > 20
    driver.forget()
    enough(driver, program)
    assert {(stack.python, stack.frames[0].name) for stack in driver.seen()} == {(second, "second")}


def test_a_shell_that_becomes_python_is_looked_up_at_once(driver: Driver) -> None:
    """Not when it would have been asked for again as the shell that it was for so long."""
    shell = 'echo ready; SECONDS=0; while [ $SECONDS -lt 2 ]; do :; done; exec "$@"'
    program = driver.start(["bash", "-c", shell, "bash", *spinning("spin", 2.0)])
    assert driver.run(30, lambda: len(program.lines()) == 2)
    driver.forget()
    driver.until_ended(program)
    used = leaves(driver.seen(program.pid))["spin"]
    assert used > 0.6 * (used + driver.unresolved()["not_python"] + driver.unresolved()["starting"])


# ---- process id namespaces


INSIDE = """
import json, os, subprocess, sys, time
from tests.python_stacks.driver import driving, leaves
with driving() as driver:
    program = driver.start(json.loads(sys.argv[1]))
    driver.until_ready()
    driver.forget()
    driver.run(20, lambda: driver.running[program.pid] >= 60)
    driver.drain()
    level = driver.sampler.namespace_level
    print(json.dumps([level, program.pid, leaves(driver.seen(program.pid)), driver.unresolved()]))
"""


def test_the_sampler_in_a_process_id_namespace_of_its_own(driver: Driver) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    command = [*unshare, sys.executable, "-c", INSIDE, json.dumps(spinning("spin"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    level, pid, seen, unresolved = json.loads(done.stdout)
    assert level == driver.sampler.namespace_level + 1
    assert pid < 1000
    assert seen["spin"] >= 0.95 * (sum(seen.values()) + sum(unresolved.values())) > 50


def test_a_process_in_another_namespace_has_the_pid_that_is_seen_here(driver: Driver) -> None:
    program = driver.start(["unshare", "--pid", "--fork", "--mount-proc", *spinning("spin")])
    driver.until_ready()
    driver.forget()
    (child,) = map(int, Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split())
    assert driver.run(30, lambda: driver.running[child] >= 30), driver.samples
    assert {(names(stack), stack.pid) for stack in driver.seen()} == {(("<module>", "spin"), child)}


# ---- children, short lives


def test_children_are_seen_from_their_first_sample_on(driver: Driver) -> None:
    """What a process is is known of its children too: nothing of them is "starting"."""
    fork = (
        "import os, time\ndef child():\n t = time.thread_time()\n while time.thread_time() < t + 0.1: pass\n"
    )
    fork += "print('ready', flush=True)\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass\n"
    fork += "for _ in range(20):\n"
    fork += " if not os.fork(): child(); os._exit(0)\n os.wait()\n"
    program = driver.start([SYSTEM, "-c", fork])
    driver.until_ready()
    assert driver.run(30, lambda: bool(driver.seen(program.pid)))  # its parent is known
    driver.forget()
    driver.until_ended(program)
    assert leaves(driver.seen())["child"] > 0.7 * 20 * 0.1 * 99
    assert len({stack.pid for stack in driver.seen() if stack.frames[0].name == "child"}) == 20
    assert driver.unresolved()["starting"] == 0


def test_a_process_that_has_ended_before_anybody_read_has_its_names() -> None:
    with driving(drain_s=1000) as driver:
        program = driver.start(spinning("long_gone", 1))
        assert driver.run(30, lambda: program.ended)
        assert not Path(f"/proc/{program.pid}/maps").exists()
        driver.drain()
        (stack,) = {stack for stack in driver.seen() if stack.frames[0].name == "long_gone"}
        assert stack.frames[0].line == 4
        assert leaves(driver.seen())["long_gone"] > 30


def test_200_processes_of_80_ms(node: tuple[Jobs, Driver], caplog: pytest.LogCaptureFixture) -> None:
    jobs, driver = node
    (group, slot), (other, idle) = jobs.make("many"), jobs.make("none")
    driver.sampler.select_slots(False, {slot: True, idle: True})
    short = "import time\ndef brief():\n t = time.thread_time() + 0.08\n while time.thread_time() < t: pass\n"
    loop = f'for i in $(seq 100); do {SYSTEM} -S -c "$0"; done'
    with caplog.at_level(logging.DEBUG):
        workers = [driver.start(["sh", "-c", loop, short + "brief()\n"], group) for _ in range(2)]
        driver.until_ended(*workers, seconds=120)
        driver.drain()
    taken = driver.sampler.samples(slot)
    assert driver.total[slot] == taken
    assert driver.total[idle] == driver.sampler.samples(idle) == 0
    assert {stack.slot for stack in driver.samples} == {slot}
    assert taken == pytest.approx(usage_ns(group) * 99e-9, rel=0.1)
    seen = driver.seen(slot=slot)
    spun = leaves(seen)["brief"]
    assert spun > 0.75 * 200 * 0.08 * 99
    assert {names(stack) for stack in seen if stack.frames[0].name == "brief"} == {("<module>", "brief")}
    reasons = driver.unresolved(slot)
    assert reasons.keys() <= {"starting", "not_python", "native_thread", "no_frames", "unreadable", "changed"}
    assert reasons["unreadable"] + reasons["changed"] < 0.02 * taken
    assert len(caplog.records) <= 5
    assert other.exists()


# ---- who does not want to be seen, and who is not looked at


def test_who_opts_out_is_not_read_nor_its_children(node: tuple[Jobs, Driver]) -> None:
    jobs, driver = node
    group, slot = jobs.make()
    driver.sampler.select_slots(False, {slot: True})
    off, on = {"EXPANSE_PROFILE": "off"}, {"EXPANSE_PROFILE": "on"}
    hidden = driver.start([SYSTEM, "-c", programs.FORKS, "60", "2"], group, off)
    shown = driver.start(spinning("shown"), group, on)
    driver.until_ready()
    enough(driver, shown)
    assert driver.run(30, lambda: driver.unresolved(slot)["opted_out"] >= 30)
    assert {stack.pid for stack in driver.seen(slot=slot)} == {shown.pid}
    family = {hidden.pid, *map(int, hidden.words)}
    reasons = {driver.sampler.refusals[pid].reason for pid in family & driver.sampler.refusals.keys()}
    assert Reason.OPTED_OUT in reasons


def test_only_selected_jobs_are_sampled_and_that_can_change(node: tuple[Jobs, Driver]) -> None:
    jobs, driver = node
    (a, slot_a), (b, slot_b) = jobs.make("a"), jobs.make("b")
    driver.sampler.select_slots(False, {slot_a: True})
    first, second = driver.start(spinning("first"), a), driver.start(spinning("second"), b)
    driver.until_ready()
    enough(driver, first)
    assert driver.sampler.samples(slot_b) == 0
    assert set(leaves(driver.seen())) >= {"first"}
    driver.sampler.select_slots(True, {slot_a: False})
    driver.forget()
    before = driver.sampler.samples(slot_a)
    enough(driver, second)
    assert driver.sampler.samples(slot_a) == before
    assert {stack.slot for stack in driver.seen(second.pid)} == {slot_b}
    assert leaves(driver.seen(second.pid)).keys() == {"second"}


def test_a_process_that_changes_its_job_is_the_other_jobs_from_then_on(node: tuple[Jobs, Driver]) -> None:
    jobs, driver = node
    (a, slot_a), (b, slot_b) = jobs.make("a"), jobs.make("b")
    driver.sampler.select_slots(False, {slot_a: True, slot_b: True})
    program = driver.start(spinning("wanderer"), a)
    driver.until_ready()
    enough(driver, program)
    (b / "cgroup.procs").write_text(str(program.pid))
    driver.forget()
    before = driver.sampler.samples(slot_a)
    enough(driver, program)
    assert driver.sampler.samples(slot_a) == before
    assert {(stack.slot, stack.frames[0].name) for stack in driver.seen()} == {(slot_b, "wanderer")}


def test_what_is_not_python_is_counted_as_that(node: tuple[Jobs, Driver]) -> None:
    jobs, driver = node
    group, slot = jobs.make()
    driver.sampler.select_slots(False, {slot: True})
    program = driver.start(["sh", "-c", "echo ready; while :; do :; done"], group)
    driver.until_ready()
    assert driver.run(30, lambda: driver.unresolved(slot)["not_python"] >= 50)
    assert not driver.seen()
    assert driver.sampler.refusals[program.pid].reason is Reason.NOT_PYTHON


def test_a_thread_that_python_does_not_know(driver: Driver, tmp_path: Path) -> None:
    library = compiled("native.c", tmp_path / "native.so", "-shared", "-fPIC")
    code = f"import ctypes\nassert ctypes.CDLL({str(library)!r}).start() == 0\n"
    program = driver.start([SYSTEM, "-c", code + SPIN.format("spin", 120)])
    driver.until_ready()
    driver.forget()
    enough(driver, program)
    assert driver.run(30, lambda: driver.unresolved()["native_thread"] >= 30)
    assert {names(stack) for stack in driver.seen()} == {("<module>", "spin")}


# ---- who misleads

WAYS = (
    "behaves",
    "cyclic threads",
    "cyclic frames",
    "frames of nothing",
    "absurd lengths",
    "floods",
    "garbage",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout = for_version(11, platform.machine())
    places = {name: getattr(layout, name) for name, *_ in layout._fields_}
    defined = [f"-DAT_{name.upper()}={value}" for name, value in places.items()]
    return compiled("hostile.c", tmp_path_factory.mktemp("hostile") / "hostile", "-rdynamic", *defined)


def resident_kib() -> int:
    """Memory of this process."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def test_whoever_misleads_harms_nobody_else(hostile: Path) -> None:
    with jobs_of_a_node(rate_hz=299, waits_hz=4) as (jobs, driver):
        good, good_slot = jobs.make("good")
        bad = {way: jobs.make(f"bad-{number}") for number, way in enumerate(WAYS)}
        slots = {way: slot for way, (_, slot) in bad.items()}
        driver.sampler.select_slots(False, dict.fromkeys([good_slot, *slots.values()], True))
        honest = driver.start(spinning("honest"), good)
        liars = {
            way: driver.start([str(hostile), str(number)], bad[way][0]) for number, way in enumerate(WAYS)
        }
        driver.until_ready()
        # Each is taken for an interpreter, and what it shows is harmless text.
        enough(driver, honest, *liars.values(), samples=10)
        shown = {frame.name for stack in driver.seen() if stack.slot != good_slot for frame in stack.frames}
        assert shown == {"a␊;b␛"}
        for liar in liars.values():
            os.kill(liar.pid, signal.SIGUSR1)
        driver.run(1)
        driver.forget()
        before = resident_kib()
        driver.run(8)
        enough(driver, honest)
        driver.drain()
        assert resident_kib() - before < 60_000
        assert {names(stack) for stack in driver.seen(slot=good_slot)} == {("<module>", "honest")}
        assert driver.unresolved(good_slot).total() <= 0.02 * driver.running[honest.pid]
        for stack in driver.samples:
            assert len(stack.frames) <= 128
            assert all(len(frame.name) <= 1024 and frame.name.isprintable() for frame in stack.frames)
        reasons = {way: driver.unresolved(slot) for way, slot in slots.items()}
        resolved = {way: driver.seen(slot=slot).total() for way, slot in slots.items()}
        assert resolved["behaves"] > 0
        assert reasons["behaves"].total() == 0
        assert resolved["cyclic threads"] == resolved["frames of nothing"] == 0
        assert set(reasons["cyclic threads"]) == {"over_budget"}
        assert set(reasons["frames of nothing"]) == {"no_frames"}
        assert {len(stack.frames) for stack in driver.seen(slot=slots["cyclic frames"])} == {128}
        assert reasons["floods"]["over_budget"] > 0
        for program in driver.programs:
            program.close()
        driver.drain()
        for slot in (good_slot, *slots.values()):
            assert driver.total[slot] == driver.sampler.samples(slot) > 0


def test_a_job_that_brings_ever_more_kinds_of_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.13 on layouts come out of files, which anybody can make: the limit is each job's own."""
    monkeypatch.setattr(sampler, "_MAX_NEW_LAYOUTS", 1)
    with jobs_of_a_node() as (jobs, driver):
        (a, slot_a), (b, slot_b) = jobs.make("a"), jobs.make("b")
        driver.sampler.select_slots(False, {slot_a: True, slot_b: True})
        first = driver.start(spinning("first", python=of_debug_offsets().command[0]), a)
        enough(driver, first)
        table = driver.start(spinning("table", python=of_the_table().command[0]), a)
        enough(driver, table)
        driver.sampler._numbers.clear()  # the same one, as if it were of another kind
        known = driver.start(spinning("second", python=of_debug_offsets().command[0]), a)
        assert driver.run(30, lambda: driver.unresolved(slot_a)["unsupported"] > 10)
        assert "too many kinds" in driver.sampler.refusals[known.pid].detail
        other = driver.start(spinning("other", python=of_debug_offsets().command[0]), b)
        enough(driver, other)
        assert leaves(driver.seen(slot=slot_b))["other"] >= 30


# Each file is compiled, run for a tenth of a second and dropped: the next is where it was, all of it.
FILES = """
import os, sys, time
print(os.getpid(), flush=True)
for k in range(60):
    name = "/plugins/plugin_%05d.py" % k
    space = {"time": time}
    text = "class Plugin:\\n def run(self):\\n  t = time.perf_counter() + 0.1\\n"
    exec(compile(text + "  while time.perf_counter() < t: pass\\n", name, "exec"), space)
    print(k, flush=True)
    space["Plugin"]().run()
    space.clear()
"""


@pytest.mark.parametrize("name", interpreters.names())
def test_files_that_follow_one_another_at_the_same_addresses(name: str, driver: Driver) -> None:
    interp = interpreters.interpreter(name)
    program = driver.start(interp.run(FILES))
    driver.until_ready()
    driver.until_ended()
    files = {
        frame.file
        for stack in driver.seen(program.pid)
        for frame in stack.frames
        if frame.name.endswith("run")
    }
    assert len(files) > 20, files
