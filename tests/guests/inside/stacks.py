"""Python stacks on the kernel at hand: one thread that works, one that waits, one process that is forked.

Ends with 1 when a figure was wrong; what was compared is in /out/stacks.json.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from figures import Book
from truth import until

from expanse_ebpf.kernel import trials
from expanse_ebpf.python_stacks.sampler import Count, Sampler

# Works in the parent and in a child for so many seconds of CPU time each, and then waits for its end.
WORK = """
import os, sys, threading, time
def spin():
    while time.process_time() < 3: pass
def parent(): spin()
def child(): spin()
def parked(): threading.Event().wait(60)
def ends(): sys.stdin.read()
threading.Thread(target=parked, daemon=True).start()
print(flush=True)
sys.stdin.readline()
pid = os.fork()
child() if pid == 0 else parent()
print(pid, time.process_time(), flush=True)
ends()
os._exit(0)
"""
SLEEPS_S, RATE_HZ, WAITS_HZ = 0.25, 99, 4


def names(count: Count) -> list[str]:
    return [frame.name for frame in count.stack.frames]


def main() -> int:
    book = Book()
    work = subprocess.Popen(
        [sys.executable, "-S", "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert work.stdin is not None
    assert work.stdout is not None
    work.stdout.readline()
    began = time.monotonic()
    sampler = Sampler(rate_hz=RATE_HZ, waits_hz=WAITS_HZ)
    print(f"loaded in {time.monotonic() - began:.1f} s", flush=True)
    sampler.select_pid(work.pid)
    work.stdin.write("\n")
    work.stdin.flush()
    counts: list[Count] = []
    began = time.monotonic()
    said = ""
    while said.count("\n") < 2:
        assert time.monotonic() - began < 120
        if select.select([work.stdout], [], [], SLEEPS_S)[0]:
            said += os.read(work.stdout.fileno(), 4096).decode()
        sampler.consume()
        sampler.visit()
        counts += sampler.drain()
    done = [line.split() for line in said.splitlines()]
    lasted = time.monotonic() - began
    work.stdin.close()
    work.wait()
    child = next(pid for pid, _ in done if pid != "0")
    until("the child has ended", lambda: not os.access(f"/proc/{child}/exe", os.F_OK))
    counts += sampler.drain()
    for stack in dict.fromkeys(c.stack for c in counts):
        samples = sum(c.samples for c in counts if c.stack == stack)
        frames = [f"{frame.name}:{frame.line}" for frame in stack.frames]
        print(samples, stack.pid, stack.waiting, stack.gil, stack.unresolved, frames)
    print(sampler.unavailable, sampler.refusals)

    running = [c for c in counts if not c.stack.waiting]
    for who in ("parent", "child"):
        spent = next(float(seconds) for pid, seconds in done if (pid == "0") == (who == "child"))
        seen = sum(c.samples for c in running if names(c)[:2] == ["spin", who])
        # Until the interpreter has been looked up samples have no names, and an emulator that is short of
        # CPU skips ticks of a clock.
        book.compare(f"{who}: samples", seen, spent * RATE_HZ * 0.2, spent * RATE_HZ * 1.1)
    book.compare("samples are all there", sum(c.samples for c in running), sampler.samples(0))
    book.holds("the fork is a process of its own", len({c.stack.pid for c in running if c.stack.frames}) == 2)
    sleepable = trials.link_sleepable_task_iterator() == 0
    book.holds(
        "waiting threads are seen where the kernel can", sleepable == ("waiting" not in sampler.unavailable)
    )
    if sleepable:
        slept = sum(c.ns for c in counts if c.stack.waiting and "parked" in names(c)) / 1e9
        book.compare("the parked thread's time", slept, lasted * 0.7, lasted * 1.2)
    sampler.close()
    return book.close("stacks.json")


if __name__ == "__main__":
    sys.exit(main())
