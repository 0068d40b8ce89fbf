"""Threads that wait: where, for how long, and that nothing is done to them."""

from __future__ import annotations

import os
import platform
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.python_stacks.layouts import for_version
from tests.python_stacks import interpreters, programs
from tests.python_stacks.driver import Driver, driving, jobs_of_a_node, leaves, names, places

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SYSTEM = "/usr/bin/python3"
SLEEP = """
import os, signal, sys, time

def asleep():
    while True:
        time.sleep(1000)

signal.signal(signal.SIGUSR1, lambda *_: None)
print(os.getpid(), id(asleep.__code__), flush=True)
asleep()
"""
ASLEEP = (4, 6)  # first line of the function, and the line it sleeps in


@pytest.fixture
def driver() -> Iterator[Driver]:
    # Once a second, so that a visit may come late; tests call visit() themselves.
    with driving(rate_hz=99, waits_hz=1) as made:
        made.stop_visits()
        yield made


def visit(driver: Driver) -> float:
    """One visit; when (monotonic, seconds)."""
    driver.sampler.visit()
    driver.sampler.end_visit()
    driver.sampler.consume()
    return time.monotonic()


def sleeper(driver: Driver) -> int:
    """Start SLEEP; its pid, once it sleeps and is known to be Python."""
    program = driver.start([SYSTEM, "-c", SLEEP])
    driver.until_ready()

    def known() -> bool:
        visit(driver)
        driver.drain()
        return "asleep" in leaves(driver.seen(program.pid, waiting=True))

    assert driver.run(30, known), driver.samples
    driver.forget()
    return program.pid


def test_the_time_of_a_thread_that_sleeps_is_the_time_that_passed(driver: Driver) -> None:
    pid = sleeper(driver)
    began = visit(driver)
    driver.forget()
    for pause in (0.05, 0.3, 0.1, 0.2, 0.07, 0.25) * 3:
        time.sleep(pause)
        ended = visit(driver)
    driver.drain()
    (stack,) = driver.seen(pid, waiting=True)
    assert places(stack)[-1] == ("asleep", ASLEEP[1])
    assert driver.samples[stack] == 18
    assert driver.ns[stack] == pytest.approx((ended - began) * 1e9, rel=0.1)
    assert not driver.seen(pid)


def test_what_runs_does_not_wait_and_what_waits_does_not_run(driver: Driver) -> None:
    pid = sleeper(driver)
    spin = "import time\nprint('ready', flush=True)\ndef busy():\n while True: pass\nbusy()\n"
    program = driver.start([SYSTEM, "-c", spin])
    driver.until_ready()
    driver.forget()
    for _ in range(40):
        driver.run(0.05)
        visit(driver)
    assert driver.run(30, lambda: driver.running[program.pid] > 30)
    driver.drain()
    assert not driver.seen(pid)
    assert not driver.seen(program.pid, waiting=True)
    assert leaves(driver.seen(program.pid))["busy"] > 30
    assert leaves(driver.seen(pid, waiting=True)) == {"asleep": 40}


def test_a_thread_that_has_not_run_is_not_read_again_and_one_that_has_is(driver: Driver) -> None:
    """Its memory is changed behind its back: that is seen once it has run, and not before."""
    pid = sleeper(driver)
    (code,) = map(int, driver.programs[-1].words)
    layout = for_version(interpreters.interpreter("3.11 system").minor, platform.machine())
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), (100).to_bytes(4, "little"), code + layout.code_first_line)
    for _ in range(5):
        visit(driver)
    driver.drain()
    assert {(stack.frames[0].first_line, n) for stack, n in driver.seen(pid, waiting=True).items()} == {
        (ASLEEP[0], 5)
    }
    os.kill(pid, signal.SIGUSR1)
    driver.forget()

    def moved() -> bool:
        visit(driver)
        driver.drain()
        return {stack.frames[0].first_line for stack in driver.seen(pid, waiting=True)} >= {100}

    assert driver.run(10, moved), driver.samples


def test_a_thread_that_moves_on_is_seen_where_it_is(driver: Driver) -> None:
    code = "import time\nprint('ready', flush=True)\n"
    for name in ("left", "middle", "right"):
        code += f"def {name}(): time.sleep(0.2)\n"
    program = driver.start([SYSTEM, "-c", code + "while True: left(); middle(); right()\n"])
    driver.until_ready()
    driver.run(0.5)
    driver.forget()
    for i in range(60):
        driver.run(0.04 + i % 7 / 100)
        visit(driver)
    driver.drain()
    seen = leaves(driver.seen(program.pid, waiting=True))
    assert seen.keys() == {"left", "middle", "right"}
    assert min(seen.values()) > 8


def test_a_visit_wakes_nobody_up(driver: Driver) -> None:
    pid = sleeper(driver)
    status = Path(f"/proc/{pid}/status")

    def switches() -> list[str]:
        return [line for line in status.read_text().splitlines() if "ctxt_switches" in line]

    before = switches()
    for _ in range(50):
        visit(driver)
    assert switches() == before
    driver.drain()
    assert driver.seen(pid, waiting=True).total() == 50


def test_a_queue_that_is_empty(driver: Driver) -> None:
    """Who waits for a batch is seen in the line that takes it from the queue, and who makes it in its own."""
    program = driver.start([SYSTEM, "-c", programs.QUEUE_WAIT, "60"])
    driver.until_ready()
    driver.run(0.5)
    visit(driver)
    driver.forget()
    began = visit(driver)
    driver.forget()
    for i in range(40):
        driver.run(0.05 + i % 5 / 100)
        ended = visit(driver)
    driver.drain()
    get = programs.line(programs.QUEUE_WAIT, "self.batches.get()")
    put = programs.line(programs.QUEUE_WAIT, "time.sleep(0.05)")
    took = made = 0
    for stack in driver.seen(program.pid, waiting=True):
        took += ("DataLoader.__next__", get) in places(stack) and driver.ns[stack]
        made += places(stack)[-1] == ("produce", put) and driver.ns[stack]
    wall = (ended - began) * 1e9
    # Each may have been awake when it was visited; a millisecond in fifty, or longer where CPUs are busy.
    assert 0.6 * wall < took <= 1.02 * wall
    assert 0.6 * wall < made <= 1.02 * wall
    assert not any("sleep" in names(stack) for stack in driver.seen(program.pid))


def test_without_visits_nobody_waits() -> None:
    with driving(waits_hz=0) as driver:
        driver.start([SYSTEM, "-c", SLEEP])
        driver.until_ready()
        driver.sampler.visit()
        driver.drain()
        assert not any(stack.waiting for stack in driver.samples)
        assert driver.sampler.unavailable == {}


def test_jobs_that_are_not_selected_are_not_visited_and_no_shell_is_told_of() -> None:
    with jobs_of_a_node(waits_hz=1) as (jobs, driver):
        driver.stop_visits()
        (a, slot_a), (b, slot_b) = jobs.make("a"), jobs.make("b")
        driver.sampler.select_slots(False, {slot_a: True})
        shell = driver.start(["sh", "-c", "echo ready; sleep 100; true"], a)
        seen, unseen = driver.start([SYSTEM, "-c", SLEEP], a), driver.start([SYSTEM, "-c", SLEEP], b)
        driver.until_ready()

        def known() -> bool:
            visit(driver)
            driver.drain()
            return driver.waiting[seen.pid] >= 5

        assert driver.run(30, known)
        waiting = {stack for stack in driver.samples if stack.waiting}
        assert {(stack.slot, stack.pid, stack.unresolved) for stack in waiting} == {(slot_a, seen.pid, "")}
        driver.sampler.select_slots(False, {slot_b: True})
        driver.forget()
        assert driver.run(30, lambda: known() or driver.waiting[unseen.pid] >= 5)
        assert driver.waiting.keys() == {unseen.pid}
        assert shell.pid not in driver.waiting


# Each thread sleeps for moments under one chain of calls and under another, in turn.
TURNS = """
import os, threading, time
def leaf_a(): time.sleep(0.0002)
def leaf_b(): time.sleep(0.0002)
def deep_a(n): deep_a(n - 1) if n else leaf_a()
def deep_b(n): deep_b(n - 1) if n else leaf_b()
def turns():
    end = time.monotonic() + 120
    while time.monotonic() < end:
        deep_a(20)
        deep_b(20)
for _ in range(6):
    threading.Thread(target=turns, daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(120)
"""


def test_a_stack_is_of_one_moment_though_nothing_is_stopped(driver: Driver) -> None:
    """Threads that run on while they are read are left out, and never seen in two places at once."""
    program = driver.start([SYSTEM, "-c", TURNS])
    driver.until_ready()
    end = time.monotonic() + 12
    while time.monotonic() < end:
        for _ in range(50):
            visit(driver)
        driver.drain()
    stacks = [set(names(stack)) for stack in driver.seen(program.pid, waiting=True)]
    a, b = {"deep_a", "leaf_a"}, {"deep_b", "leaf_b"}
    assert [each for each in stacks if each & a]
    assert [each for each in stacks if each & b]
    assert not [each for each in stacks if each & a and each & b]


def test_visits_take_nothing_of_what_a_job_may_have_looked_up() -> None:
    """Else nobody would look up new processes of a job with many threads that wait."""
    with jobs_of_a_node(waits_hz=1) as (jobs, driver):
        driver.stop_visits()
        group, slot = jobs.make("many")
        driver.sampler.select_slots(False, {slot: True})
        program = driver.start([SYSTEM, "-c", TURNS], group)
        driver.until_ready()

        def seen() -> bool:
            visit(driver)
            driver.drain()
            return driver.waiting[program.pid] > 20

        assert driver.run(30, seen)
        asks = []  # of the present second, see struct python_slot
        for _ in range(200):
            visit(driver)
            asks += struct.unpack_from("=I", driver.sampler._kernel._slots, slot * 512 + 264)
        driver.drain()
        assert max(asks) < 5
