"""Training of torchvision's ResNet-50, on images or on noise of the same shape.

Images are read by a DataLoader as they are for ImageNet: cropped and resized at random to 224x224, mirrored
at random, normalised. A folder is one with a folder for each class, such as imagenette2-320/train. Without
one, images of 320x320 are made up; they go the same way, but for being decoded from JPEG.

Every draw is from a fixed seed. The last line is `seconds S`: what all steps but the first took; the first is
beyond --steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

SEED = 0
SIDE, CROP, CLASSES = 320, 224, 10  # Imagenette's
MADE_UP = 256  # images
STEPS = {"cpu": 6, "cuda": 1000}  # some 5 s on 2 CPUs, a minute on a GPU
BATCH = {"cpu": 4, "cuda": 64}
MOST_WORKERS = 16
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, by colour


class MadeUp:
    """Images of noise, the same in every run: a data set as torch.utils.data.Dataset has it."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform

    def __len__(self) -> int:
        return MADE_UP

    def __getitem__(self, index: int) -> Any:
        """(image, class)."""
        import random

        from PIL import Image

        noise = random.Random(index).getrandbits(8 * 3 * SIDE * SIDE).to_bytes(3 * SIDE * SIDE, "little")
        return self._transform(Image.frombytes("RGB", (SIDE, SIDE), noise)), index % CLASSES


def batches(folder: str, count: int, size: int, workers: int, pinned: bool) -> Any:
    """So many batches of (images, classes), and the number of classes."""
    import torch
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(CROP),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _DEVIATION),
        ]
    )
    data: Any = datasets.ImageFolder(folder, transform) if folder else MadeUp(transform)
    # With replacement, so that a small folder has enough for any number of steps.
    order = torch.utils.data.RandomSampler(data, replacement=True, num_samples=count * size)
    return torch.utils.data.DataLoader(
        data, batch_size=size, sampler=order, num_workers=workers, pin_memory=pinned
    ), (len(data.classes) if folder else CLASSES)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--cpus", type=int, default=0, help="threads on the CPU; workers for a GPU (default: all)"
    )
    parser.add_argument("--steps", type=int, default=0, help=f"default: {STEPS}")
    parser.add_argument("--batch", type=int, default=0, help=f"images in a step (default: {BATCH})")
    parser.add_argument("--images", default="", help="a folder (default: made up)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    print(f"seconds {train(options):.6f}")


def train(options: argparse.Namespace) -> float:
    """Seconds that the steps take."""
    import torch
    import torchvision

    device, cuda = torch.device(options.device), options.device == "cuda"
    cpus = options.cpus or len(os.sched_getaffinity(0))
    steps = options.steps or STEPS[options.device]
    torch.manual_seed(SEED)
    torch.set_num_threads(cpus)
    # A step on the CPU takes so long that one worker keeps up with it; a GPU is fed by all CPUs.
    workers = min(cpus, MOST_WORKERS) if cuda else 1
    loader, classes = batches(
        options.images, steps + 1, options.batch or BATCH[options.device], workers, pinned=cuda
    )
    model = torchvision.models.resnet50(num_classes=classes).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    began = 0.0
    for number, (images, labels) in enumerate(loader):
        if number == 1:
            began = now()
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = loss_of(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = now() - began
    print(f"loss {loss.item():.4f}", flush=True)
    return seconds


if __name__ == "__main__":
    main()
