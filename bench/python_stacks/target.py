"""What bench.python_stacks looks at; run as a file by the interpreter in question, 3.8 or newer.

    target.py count|sweep|rest|nap FRAMES NUMBER FILE
    target.py family FRAMES NUMBER FILE

`count` counts what it has done in the 8 bytes number NUMBER of FILE, FRAMES frames deep; `sweep` does the
same and reads much more memory than a cache holds. `rest` and `nap` have NUMBER threads, FRAMES frames
deep, that wait for ever or for 0.1 s again and again. `family` has NUMBER children that count.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable

LOOP = 2000  # steps to a unit of work: some tenths of a millisecond
SWEPT = 64 << 20  # bytes
NAP_S = 0.1


def work(_: bytes) -> int:
    total = 0
    for step in range(LOOP):
        total ^= step * step
    return total


def sweep(memory: bytes) -> int:
    return memory.count(1)


def deep(frames: int, then: Callable[..., None], *arguments: object) -> None:
    if frames > 0:
        deep(frames - 1, then, *arguments)
    else:
        then(*arguments)


def count_for_ever(counts: memoryview, number: int, unit: Callable[[bytes], int], of: bytes) -> None:
    done = 0
    while True:
        unit(of)
        done += 1
        counts[number] = done


def wait_for_ever(wait: Callable[..., object], *arguments: object) -> None:
    while True:
        wait(*arguments)


def main() -> None:
    what, frames, number, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if what == "family":
        one = [sys.executable, "-S", *sys.argv[:1], "count", sys.argv[2]]
        for child in [subprocess.Popen([*one, str(i), path]) for i in range(number)]:
            child.wait()
        return
    with open(path, "r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    if what in ("count", "sweep"):
        # Beside the deep ones: the module, this, the counting loop and what it calls.
        unit, of = (work, b"") if what == "count" else (sweep, b"\2" * SWEPT)
        deep(frames - 5, count_for_ever, counts, number, unit, of)
    locked = threading.Lock()
    locked.acquire()
    waits = (locked.acquire,) if what == "rest" else (time.sleep, NAP_S)
    # Beside the deep ones of a thread: three of threading's, and the waiting loop.
    for _ in range(number):
        threading.Thread(target=deep, args=(frames - 5, wait_for_ever, *waits), daemon=True).start()
    counts[0] = number
    while True:
        time.sleep(1000)


main()
