"""Whose code a frame is: the program's own, a library's or the standard library's. Told by its file.

A thread that waits stands, as a rule, in `threading.py` or `queue.py`. What one wants to know is the line
of the program that waits there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

_LIBRARY = re.compile(r"(?:^|/)(?:site|dist)-packages/")
# Where interpreters that are installed have it (`sysconfig`'s path "stdlib"), packed as a zip as well.
_STANDARD = re.compile(r"(?:^|/)(?:lib(?:64)?/python3\.\d+t?|python3\d+\.zip)/")
# The outermost function of every thread but the first, in `threading.py`, with and without its class:
# it tells where the standard library of an interpreter lies that was not installed.
_BOOTSTRAP = ("Thread._bootstrap", "_bootstrap")
# What `-c` of a process that multiprocessing has started calls: not the program's own command line.
_STARTED = re.compile(r"/multiprocessing/(?:spawn|forkserver|resource_tracker)\.py$")
_MOST_FILES = 1024  # whose origin is remembered
_MOST_ROOTS = 16


class Origin(IntEnum):
    """In the order in which a wait is charged to their frames."""

    PROGRAM = 0
    LIBRARY = 1
    STANDARD = 2
    NONE = 3  # no file: a frame in brackets


class _Frame(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...


class Origins:
    """What is known of the files of some interpreters."""

    def __init__(self) -> None:
        self._roots: tuple[str, ...] = ()  # directories, with a slash at the end
        self._known: dict[str, Origin] = {}

    def of(self, file: str) -> Origin:
        """The origin of the code in `file`, as the interpreter names it."""
        found = self._known.get(file)
        if found is None:
            if len(self._known) >= _MOST_FILES:
                self._known.clear()
            found = self._known[file] = self._tell(file)
        return found

    def _tell(self, file: str) -> Origin:
        if not file:
            return Origin.NONE
        if _LIBRARY.search(file):
            return Origin.LIBRARY
        standard = file.startswith(("<frozen ", *self._roots)) or _STANDARD.search(file)
        return Origin.STANDARD if standard else Origin.PROGRAM

    def charged(self, frames: Sequence[_Frame]) -> int:
        """The frame, by its place in `frames` (leaf first, not empty), that a wait is charged to.

        The innermost of the program's own, else of a library's, else the leaf.
        """
        self.learn(frames[-1])
        origins = [self.of(frame.file) for frame in frames]
        if len(frames) > 1 and frames[-1].file == "<string>" and _STARTED.search(frames[-2].file):
            origins[-1] = Origin.STANDARD
        for wanted in (Origin.PROGRAM, Origin.LIBRARY):
            if wanted in origins:
                return origins.index(wanted)
        return 0

    def learn(self, root: _Frame) -> None:
        """See by the outermost frame of a thread where its interpreter has the standard library."""
        directory, slash, name = root.file.rpartition("/")
        if name != "threading.py" or root.name not in _BOOTSTRAP or not directory:
            return
        directory += slash
        if directory not in self._roots and len(self._roots) < _MOST_ROOTS:
            self._roots += (directory,)
            self._known.clear()
