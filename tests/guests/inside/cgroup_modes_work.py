"""A piece of work of known size: `cgroup_modes_work.py NAME PART=AMOUNT…`, where `then` waits in between.

Each stretch is told in /run/told/NAME.json; the next begins, or the program ends, when somebody writes to
the pipe /run/told/NAME. Nothing is used while it waits.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import sys
import time
from pathlib import Path

FOLDER = Path("/run/told")


def spin(seconds: float) -> None:
    """So much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def spin_on_one_cpu(workers: int) -> None:
    """A second of CPU time for each of several processes that share one CPU."""
    start, begin = os.pipe()
    children = []
    for _ in range(workers):
        child = os.fork()
        if child == 0:
            os.close(begin)
            os.sched_setaffinity(0, {0})
            os.read(start, 1)  # ends for all at once
            spin(1)
            os._exit(0)
        children.append(child)
    os.close(begin)
    for child in children:
        os.waitpid(child, 0)


def read_and_write(path: Path, mebibytes: int) -> None:
    """Write a file to the disk and read it three times over."""
    block = os.urandom(1 << 20)
    with open(path, "wb", buffering=0) as file:
        for _ in range(mebibytes):
            file.write(block)
        os.fsync(file.fileno())
    for _ in range(3):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 20):
                pass
    path.unlink()


def openable(count: int) -> list[int]:
    """Which of the first so many /dev/nvidiaN the kernel lets it open; there is no driver that would."""
    found = []
    for minor in range(count):
        try:
            os.open(f"/dev/nvidia{minor}", os.O_RDWR)
        except OSError as error:
            if error.errno == errno.ENXIO:
                found.append(minor)
            elif error.errno != errno.EPERM:
                raise
    return found


def main(name: str, parts: list[str]) -> None:
    """Do all parts and wait at the end."""
    kept: list[object] = []
    found: dict[str, object] = {}
    stretches: list[dict[str, float]] = []
    children: list[int] = []
    before = 0.0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    earlier = {"switches": usage.ru_nvcsw + usage.ru_nivcsw, "cpu_s": usage.ru_utime + usage.ru_stime}
    waiting, held = os.pipe()
    for part in [*parts, "then="]:
        what, _, amount = part.partition("=")
        if what == "cpu":
            spin(float(amount))
        elif what == "switches":
            for _ in range(int(amount)):
                time.sleep(0.001)
        elif what == "memory":
            kept.append(bytearray(b"x") * (int(amount) << 20))
        elif what == "children":
            for _ in range(int(amount)):
                child = os.fork()
                if child == 0:
                    os.close(held)
                    os.read(waiting, 1)  # until the parent has gone
                    os._exit(0)
                children.append(child)
        elif what == "spinners":
            spin_on_one_cpu(int(amount))
        elif what == "gpus":
            found["gpus"] = openable(int(amount))
            found["variables"] = {key: text for key, text in os.environ.items() if re.search("GPU|CUDA", key)}
        elif what == "disk":
            read_and_write(Path(f"/scratch/{name}"), int(amount))
        elif what == "forever":
            (FOLDER / f"{name}.json").write_text(json.dumps({"pid": os.getpid(), "stretches": []}))
            while True:
                spin(1)
        else:
            used = sum(
                usage.ru_utime + usage.ru_stime
                for usage in (
                    resource.getrusage(resource.RUSAGE_SELF),
                    resource.getrusage(resource.RUSAGE_CHILDREN),
                )
            )
            stretches.append({"cpu_s": used - before})
            before = used
            told = {"pid": os.getpid(), "children": children, "earlier": earlier, "stretches": stretches}
            told |= found
            (FOLDER / f"{name}.new").write_text(json.dumps(told))
            (FOLDER / f"{name}.new").rename(FOLDER / f"{name}.json")
            with open(FOLDER / name) as pipe:
                pipe.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
