"""Context switches, as many as there can be: the worst case for whoever looks at every one of them.

The two processes of a pair pass a token through pipes, so each turn is two switches. There are two parts:

together   every CPU has a pair, pinned to it: all switches are from one process of the job to another
apart      the processes of a pair are on CPUs of their own, which fall idle at each turn

Waking an idle CPU takes long, so the second part has a hundredth of the turns. It is left out on one CPU.
The last line is `seconds S`: what all turns took, without the start of the processes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

TURNS = 1_200_000
APART = 100  # times fewer turns
WARM_UP = 1000
_PR_SET_PDEATHSIG = 1


def lead(take: int, give: int, ready: int, go: int, turns: int) -> None:
    """Give the token away and wait until it is back, again and again."""
    read, write = os.read, os.write
    for count in (WARM_UP, turns):
        for _ in range(count):
            write(give, b"t")
            if not read(take, 1):
                raise EOFError
        write(ready, b"r")
        read(go, 1)


def follow(take: int, give: int) -> None:
    """Give the token back as soon as it is there, until the other process has ended."""
    read, write = os.read, os.write
    while read(take, 1):
        write(give, b"t")


class Pairs:
    """Pairs of processes, each on its CPUs, that wait for the word to take `turns` turns."""

    def __init__(self, cpus: Sequence[tuple[int, int]], turns: int) -> None:
        self._pids: list[int] = []
        self._count = len(cpus)
        self._ready, ready = os.pipe()
        go, self._go = os.pipe()
        for first, second in cpus:
            there, back = os.pipe(), os.pipe()
            own = (self._ready, self._go)
            # An end of a pipe that stayed open would hide that the process at it has died.
            self._fork(first, partial(lead, back[0], there[1], ready, go, turns), (*own, there[0], back[1]))
            self._fork(second, partial(follow, there[0], back[1]), (*own, ready, go, there[1], back[0]))
            for end in (*there, *back):
                os.close(end)
        os.close(ready)
        os.close(go)

    def _fork(self, cpu: int, work: Callable[[], None], unused: Sequence[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._pids.append(pid)
            return
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:  # which could have ended before
                for end in unused:
                    os.close(end)
                os.sched_setaffinity(0, {cpu})
                work()
        finally:
            os._exit(0)

    def _await(self) -> None:
        for _ in range(self._count):
            if not os.read(self._ready, 1):
                raise EOFError("a process ended before its time")

    def seconds(self) -> float:
        """What the turns take, all pairs at once; raises EOFError when a process ends before."""
        self._await()
        began = time.perf_counter()
        os.write(self._go, b"g" * self._count)
        self._await()
        return time.perf_counter() - began

    def end(self) -> None:
        """Leave no process behind."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        os.close(self._ready)
        os.close(self._go)


def measured(cpus: Sequence[tuple[int, int]], turns: int) -> float:
    """Seconds that pairs on these CPUs take for so many turns each."""
    pairs = Pairs(cpus, turns)
    try:
        return pairs.seconds()
    finally:
        pairs.end()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpus", type=int, default=0, help="how many, of those allowed (default: all)")
    parser.add_argument("--steps", type=int, default=TURNS, help="turns of each pair (default: %(default)s)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    allowed = sorted(os.sched_getaffinity(0))
    cpus = allowed[: options.cpus or None]
    try:
        seconds = measured([(cpu, cpu) for cpu in cpus], options.steps)
        print(f"together {seconds:.6f}", flush=True)
        if len(cpus) > 1:
            apart = measured(list(zip(cpus[::2], cpus[1::2])), max(1, options.steps // APART))  # noqa: B905
            print(f"apart {apart:.6f}", flush=True)
            seconds += apart
    except (EOFError, OSError) as error:
        sys.exit(f"switches: {error}")
    print(f"seconds {seconds:.6f}")


if __name__ == "__main__":
    main()
