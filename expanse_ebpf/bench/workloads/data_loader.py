"""Training whose time goes into loading: plain Python throughout, without a package.

Worker processes, forked as PyTorch's DataLoader forks its own, decode records (zlib, struct, then loops over
each value) and augment them. The main process asks each of them for batches in turn, some ahead, and trains a
small linear model. The last line is `seconds S`: what --steps batches took, after each worker's first.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from multiprocessing.connection import Connection

STEPS, BATCH = 3000, 16
RECORDS = 64
SIDE, CROP = 28, 24  # of a picture in grey
AHEAD = 2  # batches that a worker is asked for before they are wanted
CLASSES = 10
RATE = 1e-4  # of learning
_PR_SET_PDEATHSIG = 1


def records() -> list[bytes]:
    """Pictures as they would lie on a disk: a class and then a byte for each pixel, compressed."""
    draw = random.Random(0)
    made = []
    for number in range(RECORDS):
        pixels = bytes(draw.randrange(256) for _ in range(SIDE * SIDE))
        made.append(zlib.compress(struct.pack("<I", number % CLASSES) + pixels))
    return made


def decode(record: bytes, draw: random.Random) -> tuple[int, list[float]]:
    """A picture's class and pixels: cropped, and perhaps mirrored, at random; with mean 0 and deviation 1."""
    data = zlib.decompress(record)
    (label,) = struct.unpack_from("<I", data)
    left, top = draw.randrange(SIDE - CROP), draw.randrange(SIDE - CROP)
    mirrored = draw.random() < 0.5
    pixels = []
    for y in range(top, top + CROP):
        start = 4 + y * SIDE + left
        row = data[start : start + CROP]
        for pixel in reversed(row) if mirrored else row:
            pixels.append(pixel / 255)  # noqa: PERF401 (this is to be interpreted code)
    mean = sum(pixels) / len(pixels)
    deviation = (sum((pixel - mean) ** 2 for pixel in pixels) / len(pixels)) ** 0.5
    return label, [(pixel - mean) / deviation for pixel in pixels]


def work(pipe: Connection, others: Sequence[Connection], parent: int, data: Sequence[bytes]) -> None:
    """A worker: makes the batch of each number that comes, until the main process has gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        return
    for other in others:
        other.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, size = pipe.recv()
            draw = random.Random(number)
            pipe.send([decode(data[draw.randrange(RECORDS)], draw) for _ in range(size)])


class Loader:
    """Worker processes and what they are asked for: batches by number, those of one worker in order."""

    def __init__(self, workers: int, size: int) -> None:
        self._size = size
        self._pipes: list[Connection] = []
        self._workers = []
        context, data = multiprocessing.get_context("fork"), records()
        for _ in range(workers):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            # An end of a pipe that stayed open would hide that the process at it has died.
            arguments = (theirs, tuple(self._pipes), os.getpid(), data)
            worker = context.Process(target=work, args=arguments, daemon=True)
            worker.start()
            self._workers.append(worker)
            theirs.close()

    def ask(self, number: int) -> None:
        """Have a batch made."""
        self._pipes[number % len(self._pipes)].send((number, self._size))

    def take(self, number: int) -> list[tuple[int, list[float]]]:
        """A batch that was asked for; raises EOFError or OSError when its worker has gone."""
        batch: list[tuple[int, list[float]]] = self._pipes[number % len(self._pipes)].recv()
        return batch

    def end(self) -> None:
        """Leave no process behind."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()


class Model:
    """Tells odd classes from even ones, linearly, by gradient descent on the squared error."""

    def __init__(self) -> None:
        self.weights = [0.0] * (CROP * CROP)
        self.loss = 0.0

    def step(self, batch: Sequence[tuple[int, list[float]]]) -> None:
        """Learn from one batch."""
        gradient = [0.0] * len(self.weights)
        self.loss = 0.0
        for label, pixels in batch:
            off = sum(w * x for w, x in zip(self.weights, pixels)) - label % 2  # noqa: B905
            gradient = [g + off * x for g, x in zip(gradient, pixels)]  # noqa: B905
            self.loss += off * off / len(batch)
        self.weights = [w - RATE * g for w, g in zip(self.weights, gradient)]  # noqa: B905


def train(workers: int, steps: int, size: int) -> tuple[float, float]:
    """The steps' seconds, and the loss after them; raises EOFError or OSError when a worker ends early."""
    batches = workers + steps
    loader, model = Loader(workers, size), Model()
    try:
        for number in range(min(batches, AHEAD * workers)):
            loader.ask(number)
        began = 0.0
        for number in range(batches):
            batch = loader.take(number)
            if number + AHEAD * workers < batches:
                loader.ask(number + AHEAD * workers)
            model.step(batch)
            if number == workers - 1:
                began = time.perf_counter()
        return time.perf_counter() - began, model.loss
    finally:
        loader.end()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpus", type=int, default=0, help="workers (default: as many as CPUs are allowed)")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples in each (default: %(default)s)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    workers = options.cpus or len(os.sched_getaffinity(0))
    try:
        seconds, loss = train(workers, options.steps, options.batch)
    except (EOFError, OSError):
        sys.exit("data_loader: a worker ended before its time")
    print(f"loss {loss:.6f}")
    print(f"seconds {seconds:.6f}")


if __name__ == "__main__":
    main()
