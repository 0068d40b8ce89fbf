"""The probes of a window: put in place in all files that the job maps, taken away, and put in place again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel.gpu_calls import KINDS
from expanse_ebpf.tracing.calibration import is_stepped
from expanse_ebpf.tracing.sites import Sites

if TYPE_CHECKING:
    from expanse_ebpf.kernel.gpu_calls import GpuCalls
    from expanse_ebpf.tracing.functions import Function
    from expanse_ebpf.tracing.points import Point
    from expanse_ebpf.tracing.targets import File


class Counted(NamedTuple):
    """A function and the first row of its totals; `kinds` of them, if it has several."""

    function: Function
    total: int
    kinds: int


class WindowProbes:
    """All probes of one window, on the programs of `calls`. Times are nanoseconds of the monotonic clock."""

    def __init__(self, calls: GpuCalls) -> None:
        self.in_place = False
        self.spans: list[
            tuple[int, int]
        ] = []  # when they were in place; the last one's end is 0 while they are
        self.counted: list[Counted] = []  # the functions, by the index that events have
        self.function_of: list[int] = []  # of each cookie, counted from the first point
        self.most = 0  # probes at the same time
        self.attach_ns = self.detach_ns = 0
        self.refused: dict[str, dict[str, str]] = {}  # path to function to why
        self.sites = Sites(calls.returns)
        self._calls = calls
        self._index: dict[str, int] = {}
        self._first = 0
        self._files: list[tuple[File, list[tuple[int, int]]]] = []

    def add(self, files: Iterable[File]) -> None:
        """Take up files that are new, and put their probes in place if the others are."""
        for file in files:
            places = []
            for point in file.points:
                try:
                    places.append((point.offset, self._cookie(point, _stepped(file, point))))
                except UnavailableError as error:
                    self.refused.setdefault(file.path, {})[point.function.symbol] = str(error)
            # Where probes come off one by one, those that are hit most should be the first.
            places.sort(key=lambda place: self.function(place[1])[1].category not in ("launch", "graph"))
            self._files.append((file, places))
            if self.in_place:
                began = time.monotonic_ns()
                self._put(file, places)
                self.attach_ns += time.monotonic_ns() - began

    def _cookie(self, point: Point, stepped: bool) -> int:
        function = point.function
        index = self._index.get(function.symbol)
        if index is None:
            kinds = KINDS if function.kind_arg >= 0 else 1
            total = self._calls.add_total(kinds)
            index = self._index[function.symbol] = len(self.counted)
            self.counted.append(Counted(function, total, kinds))
        total = self.counted[index].total
        cookie = self._calls.add_point(function, total, point.below, point.above, stepped=stepped)
        if not self.function_of:
            self._first = cookie
        self.function_of.append(index)
        return cookie

    @property
    def traced_s(self) -> float:
        """Seconds in which they were in place, up to now."""
        now = time.monotonic_ns()
        return sum((end or now) - begin for begin, end in self.spans) / 1e9

    def function(self, cookie: int) -> tuple[int, Function]:
        """The function that a probe with that cookie is on, and its index in `counted`."""
        index = self.function_of[cookie - self._first]
        return index, self.counted[index].function

    def attach(self) -> None:
        """Put all probes in place, and count from now on."""
        if self.in_place:
            return
        began = time.monotonic_ns()
        for file, places in self._files:
            self._put(file, places)
        self.sites.attach()
        window = self._calls.window
        window.epoch += 1
        window.counting = 1
        self.in_place = True
        self.spans.append((time.monotonic_ns(), 0))
        self.attach_ns += self.spans[-1][0] - began

    def _put(self, file: File, places: list[tuple[int, int]]) -> None:
        refused = self._calls.calls.attach(file.attach_path, places)
        if refused:
            names = {point.offset: point.function.symbol for point in file.points}
            self.refused.setdefault(file.path, {}).update({names[at]: why for at, why in refused.items()})
        self.most = max(self.most, self._calls.calls.count + self._calls.returns.count)

    def stop(self) -> None:
        """Stop counting; the probes stay where they are until detach(). Safe when there is none."""
        if not self.in_place:
            return
        self._calls.window.counting = 0
        self.spans[-1] = (self.spans[-1][0], time.monotonic_ns())
        self.in_place = False
        self.most = max(self.most, self._calls.calls.count + self._calls.returns.count)

    def detach(self) -> None:
        """Stop counting, and take all probes away; safe when there is none."""
        self.stop()
        began = time.monotonic_ns()
        self._calls.detach()
        self.detach_ns += time.monotonic_ns() - began

    def close(self) -> None:
        """Take all away for good."""
        self.detach()
        self.sites.close()


def _stepped(file: File, point: Point) -> bool:
    try:
        with open(file.attach_path, "rb", buffering=0) as code:
            code.seek(point.offset)
            return is_stepped(code.read(2))
    except OSError:
        return True
