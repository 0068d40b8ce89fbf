from __future__ import annotations

import shutil
from pathlib import Path


class MadeUpProc:
    """A /proc in which processes have device files open that this machine has not got."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def process(
        self,
        pid: int,
        *opened: str,
        numbers: tuple[int, ...] = (),
        start: int = 5,
        program: str = "/usr/bin/python3",
        thread: int = 0,
    ) -> None:
        """A process that has `opened`, by default with one number alone.

        With `thread` its first thread has exited, so that another one has the descriptors.
        """
        folder = self.path / str(pid)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "fd").mkdir(parents=True)
        descriptors = folder / "fd"
        if thread:
            descriptors = folder / "task" / str(thread) / "fd"
            (folder / "task" / str(pid) / "fd").mkdir(parents=True)
            descriptors.mkdir(parents=True)
        for number, name in enumerate(opened):
            (descriptors / str(number)).symlink_to(name)
        (folder / "exe").symlink_to(program)
        self.restart(pid, start)
        line = "\t".join(map(str, numbers or (pid,)))
        (folder / "status").write_text(f"Name:\tx\nNSpid:\t{line}\nNSpgid:\t1\n")

    def restart(self, pid: int, start: int) -> None:
        """Another process has this pid now."""
        fields = " ".join(["0"] * 18)
        (self.path / str(pid) / "stat").write_text(f"{pid} (a b) S {fields} {start} 0 0\n")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.path / str(pid))
