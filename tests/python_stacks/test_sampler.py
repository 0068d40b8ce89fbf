"""The sampler's accounts: nothing is lost without a word, and nothing is made up, however short room gets."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.kernel import python_stacks as kernel
from expanse_ebpf.python_stacks import sampler
from expanse_ebpf.python_stacks.sampler import Stack
from tests.python_stacks import programs
from tests.python_stacks.driver import Driver, Program, driving, leaves, names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SYSTEM = "/usr/bin/python3"

# The path to a leaf spells its number: `bit_0` and `bit_1`, eleven of them, then one of 2048 leaves.
PATHS = """
import sys, time
BITS = 11
space = {"time": time}
for number in range(1 << BITS):
    exec("def leaf_%d(until):\\n while time.monotonic() < until: pass" % number, space)

def bit_0(number, left):
    (space["leaf_%d" % number] if not left else (bit_0, bit_1)[number >> left - 1 & 1])(*(
        (time.monotonic() + 0.002,) if not left else (number, left - 1)))

def bit_1(number, left):
    (space["leaf_%d" % number] if not left else (bit_0, bit_1)[number >> left - 1 & 1])(*(
        (time.monotonic() + 0.002,) if not left else (number, left - 1)))

print("ready", flush=True)
end, number = time.monotonic() + float(sys.argv[1]), 1
while time.monotonic() < end:
    number = number * 16807 % 0x7fffffff
    (bit_0, bit_1)[number >> BITS - 1 & 1](number % (1 << BITS), BITS - 1)
"""

# A hundred functions that are made anew each time, all with the same number in their names and file.
FRESH = """
import sys, time
DEPTH = 100
print("ready", flush=True)
end, k = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    k += 1
    source = "\\n" * k
    for level in range(DEPTH):
        source += "def level_%d_%d(stop): level_%d_%d(stop)\\n" % (level, k, level + 1, k)
    source += "def level_%d_%d(stop):\\n while time.monotonic() < stop: pass\\n" % (DEPTH, k)
    space = {"time": time}
    exec(compile(source, "fresh_%d.py" % k, "exec"), space)
    space["level_0_%d" % k](time.monotonic() + 0.012)
"""


@pytest.fixture
def started() -> Iterator[Driver]:
    with driving() as driver:
        yield driver


def is_a_path(stack: Stack) -> bool:
    """Whether the stack is one that PATHS can have."""
    bits = [name for name in names(stack) if name.startswith("bit_")]
    leaf = [name for name in names(stack) if name.startswith("leaf_")]
    if not leaf:
        return True
    number = "".join(bit[-1] for bit in bits)
    first = names(stack)[0]
    return first == "<module>" and len(bits) == 11 and leaf == [f"leaf_{int(number, 2)}"]


def whole_accounts(driver: Driver) -> int:
    """Ends the programs; how many samples there were, each of which has been counted."""
    for program in driver.programs:
        program.close()
    driver.drain()
    driver.drain()
    assert driver.total[0] == driver.sampler.samples(0)
    return driver.total[0]


def run(driver: Driver, text: str, seconds: float) -> Program:
    program = driver.start([SYSTEM, "-c", text, str(seconds)])
    driver.until_ready()
    return program


# ---- rows of the table of stacks


def test_with_too_few_rows_what_is_left_is_right_and_the_rest_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "_PUT_UP", 20)
    with driving(rate_hz=499) as driver:
        driver.sampler._kernel._free.clear()
        program = run(driver, PATHS, 3)
        driver.until_ended(program)
        seen, lost = driver.seen(program.pid), driver.unresolved()["lost"]
        assert 10 < len(seen) <= 20  # two places in one line are two rows
        assert all(map(is_a_path, seen))
        assert lost > 100
        assert whole_accounts(driver) == seen.total() + driver.unresolved().total()


def test_rows_are_used_again_and_never_for_two_stacks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PUT_UP", 150)
    with driving(rate_hz=499, drain_s=0.1) as driver:
        # As if the table were that small: a new beginning each time half of it is used.
        monkeypatch.setattr(kernel, "MAX_STACKS", 300)
        driver.sampler._kernel._free = deque(range(150, 300))
        epochs = []
        renew = kernel.PythonStacks.renew

        def counted_renew(self: kernel.PythonStacks) -> None:
            epochs.append(len(self._used))
            renew(self)

        monkeypatch.setattr(kernel.PythonStacks, "renew", counted_renew)
        program = run(driver, PATHS, 5)
        driver.until_ended(program)
        seen = driver.seen(program.pid)
        assert len(epochs) > 2
        assert len(seen) > 100
        assert all(map(is_a_path, seen))
        whole_accounts(driver)


def test_code_is_forgotten_and_described_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_MAX_CODES", 300)
    with driving(rate_hz=99, drain_s=0.2) as driver:
        program = run(driver, FRESH, 5)
        most = 0

        def watch() -> bool:
            nonlocal most
            most = max(most, len(driver.sampler._codes))
            return program.ended

        assert driver.run(30, watch)
        driver.drain()
        seen = driver.seen(program.pid)
        assert sum(samples for stack, samples in seen.items() if is_fresh(stack)) > 50
        assert all(map(is_fresh, seen))
        # Three drains' worth of new code, at most 100 of it for a sample, and what is remembered.
        assert most < 300 + 4 * 0.2 * 99 * 101 * 1.5
        whole_accounts(driver)


def is_fresh(stack: Stack) -> bool:
    """Whether the stack is one that FRESH can have: one number all through, in files and lines too."""
    made = [frame for frame in reversed(stack.frames) if frame.name.startswith("level_")]
    for level, frame in enumerate(made):
        k = int(frame.name.split("_")[2])
        if frame.name != f"level_{level}_{k}" or k != int(made[0].name.split("_")[2]):
            return False
        line = k + 1 + level + (level == 100)
        if frame.file != f"fresh_{k}.py" or frame.line not in (line, line - (level == 100)):
            return False
    return True


# ---- the ring


def test_what_nobody_reads_in_time_is_lost_and_counted() -> None:
    with driving(rate_hz=499, drain_s=1000) as driver:
        program = run(driver, FRESH, 120)
        driver.run(0.5)
        before = driver.sampler.samples(0)
        with pytest.raises(subprocess.TimeoutExpired):
            program.process.wait(6)  # and nothing else
        assert driver.sampler.samples(0) > before + 100
        driver.drain()
        lost = driver.unresolved()
        assert lost["lost"] + lost["over_budget"] > 50
        assert all(map(is_fresh, driver.seen()))
        driver.forget()
        # It recovers.
        driver._drain_s = driver._next_drain = 0.2
        assert driver.run(20, lambda: driver.running[program.pid] > 50)
        assert all(map(is_fresh, driver.seen()))
        whole_accounts(driver)


# ---- the whole account


def test_samples_and_shares_are_those_of_the_cpu_time(started: Driver) -> None:
    """Ten seconds at 99 a second, on a CPU that is the program's as far as that can be had."""
    program = started.start(["nice", "-n", "-15", SYSTEM, "-c", programs.SHARES, "10.5"])
    started.until_ready()
    started.run(0.3)
    started.forget()
    before, used = started.sampler.samples(0), program.cpu_s()
    started.run(9.5)
    started.drain()
    grown, used = started.sampler.samples(0) - before, program.cpu_s() - used
    assert grown == pytest.approx(used * 99, rel=0.05, abs=6)
    counts = leaves(started.seen(program.pid))
    started.until_ended()
    for name, said in zip(("fifty", "thirty", "twenty"), program.lines()[-1].split(), strict=True):
        share = float(said)
        # Where it had to share the CPU, whom a sample meets is a matter of chance.
        points = 0.03 + (3 * (share * (1 - share) / grown) ** 0.5 if used < 8 else 0)
        assert counts[name] / counts.total() == pytest.approx(share, abs=points)
    whole_accounts(started)


def test_the_same_as_py_spy_says() -> None:
    """Both look at the same program for the same seconds."""
    with driving() as driver:
        program = run(driver, programs.SHARES, 60)
        driver.forget()
        spy = Path(sys.executable).with_name("py-spy")
        command = [str(spy), "record", "--format", "raw", "--rate", "99", "--nonblocking"]
        command += ["--duration", "6", "--output", "/dev/stdout", "--pid", str(program.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as other:
            assert driver.run(60, lambda: other.poll() is not None)
            assert other.stdout is not None
            folded = other.stdout.read().splitlines()
        driver.drain()
        theirs = dict.fromkeys(("fifty", "thirty", "twenty"), 0)
        for line in folded:
            stack, _, count = line.rpartition(" ")
            leaf = stack.split(";")[-1].split(" ")[0]
            if leaf in theirs and "<module>" in stack:
                theirs[leaf] += int(count)
        ours = {name: leaves(driver.seen(program.pid))[name] for name in theirs}
        assert min(sum(ours.values()), sum(theirs.values())) > 100
        assert max(ours, key=ours.__getitem__) == max(theirs, key=theirs.__getitem__) == "fifty"
        for name in theirs:
            share = theirs[name] / sum(theirs.values())
            assert ours[name] / sum(ours.values()) == pytest.approx(share, abs=0.08)


def test_it_can_be_closed_twice(started: Driver) -> None:
    started.sampler.close()
    started.sampler.close()
