"""The demo's training job: a small neural network in plain Python, fed by a loader process.

Run as `python -m expanse_ebpf.cli.demo_training FOLDER`; it trains until it is told to stop, and
writes a checkpoint to FOLDER now and then.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import sys
from multiprocessing.connection import Connection
from pathlib import Path

INPUTS, HIDDEN, BATCH = 16, 24, 64
RATE = 0.1
CHECKPOINT_EVERY = 50  # batches

Batch = list[tuple[list[float], float]]


def load_batches(out: Connection) -> None:
    """Make batches for ever: points, labelled by whether they lie within a ball."""
    source = random.Random(7)
    while True:
        batch: Batch = []
        for _ in range(BATCH):
            point = [source.gauss(0, 1) for _ in range(INPUTS)]
            batch.append((point, 1.0 if sum(x * x for x in point) < INPUTS else 0.0))
        try:
            out.send(batch)
        except BrokenPipeError:
            return


class Network:
    """One hidden layer of tanh units and a logistic output."""

    def __init__(self) -> None:
        source = random.Random(1)
        self.hidden = [[source.gauss(0, 0.3) for _ in range(INPUTS + 1)] for _ in range(HIDDEN)]
        self.output = [source.gauss(0, 0.3) for _ in range(HIDDEN + 1)]

    def train_step(self, batch: Batch) -> float:
        """One pass of stochastic gradient descent; the mean loss (nats)."""
        loss = 0.0
        for point, label in batch:
            inputs = [*point, 1.0]
            units = [math.tanh(sum(w * x for w, x in zip(row, inputs, strict=True))) for row in self.hidden]
            score = sum(w * u for w, u in zip(self.output, [*units, 1.0], strict=True))
            guess = 1 / (1 + math.exp(-max(-30.0, min(30.0, score))))
            loss -= math.log(max(1e-12, guess if label else 1 - guess))
            slope = guess - label
            for i, unit in enumerate(units):
                back = slope * self.output[i] * (1 - unit * unit) * RATE
                self.output[i] -= RATE * slope * unit
                row = self.hidden[i]
                for j, x in enumerate(inputs):
                    row[j] -= back * x
            self.output[-1] -= RATE * slope
        return loss / len(batch)


def main(folder: Path) -> None:
    """Train until killed."""
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    loader = multiprocessing.get_context("spawn").Process(target=load_batches, args=(sender,), daemon=True)
    loader.start()
    sender.close()
    network = Network()
    step = 0
    while True:
        loss = network.train_step(receiver.recv())
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            checkpoint = folder / "checkpoint.json"
            checkpoint.write_text(
                json.dumps({"step": step, "hidden": network.hidden, "output": network.output})
            )
            print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
