"""Profiles as pprof's message: making, merging, packing and reading them.

What Expanse puts into a profile stands in `wire/profile.proto`. Everything here that reads one takes it
as hostile: whatever does not hold together raises ProfileError and nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from expanse_ebpf.errors import ExpanseError
from expanse_ebpf.export.origin import Origins
from expanse_ebpf.text import clean
from expanse_ebpf.wire.profile_pb2 import Function, Label, Line, Location, Profile, Sample, ValueType

# (name, unit) of the values of a sample, in their order.
VALUES = (("samples", "count"), ("cpu", "nanoseconds"), ("waiting", "nanoseconds"))
# The label that says why a sample has a frame in brackets instead of a stack.
UNRESOLVED = "unresolved"
# What stands for a stack without any frame.
NO_FRAME = "[no Python frame]"

MAX_INT64 = (1 << 63) - 1
# More than any real profile has; what is beyond costs too much to look at.
MAX_SAMPLES = 1 << 20
MAX_DEPTH = 4096
MAX_LABELS = 64


class ProfileError(ExpanseError):
    """This is not a profile, or not one that Expanse wrote; the message says what is wrong with it."""


class Frame(NamedTuple):
    """A function and the line in it; lines are 0 where they are not known."""

    name: str
    file: str
    line: int
    first_line: int


class Stack(NamedTuple):
    """A sample, read: frames leaf first, values in the profile's order, labels without those left empty."""

    frames: tuple[Frame, ...]
    values: tuple[int, ...]
    labels: dict[str, str | int]


# A label as it is kept: key, text, number, unit of the number.
_Label = tuple[str, str, int, str]
Values = tuple[int, ...]
T = TypeVar("T")


class ProfileBuilder:
    """Collects stacks; equal ones are added up.

    `period_ns`: CPU time between two samples. `time_ns`: the beginning, since 1970 UTC. These and
    `duration_ns` can still be set before `build`.
    """

    def __init__(self, *, period_ns: int, time_ns: int, duration_ns: int) -> None:
        self.period_ns = period_ns
        self.time_ns = time_ns
        self.duration_ns = duration_ns
        self._texts = {"": 0}
        self._functions: dict[tuple[str, str, int], int] = {}
        self._locations: dict[tuple[str, str, int, int], int] = {}
        self._samples: dict[tuple[tuple[int, ...], tuple[_Label, ...]], Values] = {}

    def add(
        self,
        frames: Iterable[tuple[str, str, int, int]],
        values: tuple[int, int, int],
        labels: Mapping[str, str | int],
    ) -> None:
        """Add a stack, leaf first: (name, file, line or 0, first line of the function or 0) for each frame.

        `values`: samples, CPU nanoseconds, waiting nanoseconds, none of them negative. An empty text as a
        label says nothing and is left out.
        """
        kept = sorted(
            (key, value, 0, "") if isinstance(value, str) else (key, "", value, "")
            for key, value in labels.items()
            if value != ""
        )
        self._add(tuple([self._location(frame) for frame in frames]), tuple(kept), values)

    def take(self, reader: Reader) -> None:
        """Add every sample of a profile with the same values. Raises ProfileError."""
        numbers = {number: self._location(frame) for number, frame in reader.frames.items()}
        for stack, labels, values in reader.samples(numbers):
            self._add(stack, labels, values)

    def _add(self, stack: tuple[int, ...], labels: tuple[_Label, ...], values: Values) -> None:
        before = self._samples.get((stack, labels))
        if before is not None:
            values = tuple([a + b for a, b in zip(before, values, strict=True)])
        self._samples[stack, labels] = values

    def _location(self, frame: tuple[str, str, int, int]) -> int:
        return self._locations.setdefault(frame, len(self._locations) + 1)

    def build(self) -> Profile:
        """What was collected so far. Sums that the format cannot hold end at its largest number."""
        profile = Profile()
        text = self._text
        profile.sample_type.extend(ValueType(type=text(name), unit=text(unit)) for name, unit in VALUES)
        profile.period_type.CopyFrom(profile.sample_type[1])
        profile.default_sample_type = text("cpu")
        profile.period = self.period_ns
        profile.time_nanos = self.time_ns
        profile.duration_nanos = _bounded(self.duration_ns)
        messages = {
            labels: [Label(key=text(k), str=text(s), num=n, num_unit=text(u)) for k, s, n, u in labels]
            for labels in dict.fromkeys(labels for _, labels in self._samples)
        }
        profile.sample.extend(
            Sample(location_id=stack, value=map(_bounded, values), label=messages[labels])
            for (stack, labels), values in self._samples.items()
        )
        profile.location.extend(
            Location(id=number, line=[Line(function_id=self._function(name, file, first), line=line)])
            for (name, file, line, first), number in self._locations.items()
        )
        # No system_name: where it equals the name, `go tool pprof` takes the name for mangled C++ and
        # shows "<module>", "<lambda>" and "<listcomp>" as "<unknown>".
        profile.function.extend(
            Function(id=number, name=text(name), filename=text(file), start_line=line)
            for (name, file, line), number in self._functions.items()
        )
        # A lone surrogate in a name must not cost the profile.
        profile.string_table.extend(text.encode("utf-8", "replace").decode() for text in self._texts)
        return profile

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _function(self, name: str, file: str, first_line: int) -> int:
        return self._functions.setdefault((name, file, first_line), len(self._functions) + 1)


def _bounded(value: int) -> int:
    return min(value, MAX_INT64)


class Reader:
    """A profile with its tables looked up and checked. Raises ProfileError, as its methods do.

    `values`: (name, unit) of the values of every sample. `frames`: what each location is.
    """

    def __init__(self, profile: Profile) -> None:
        places = max(len(profile.sample), len(profile.location), len(profile.function))
        if max(places, len(profile.string_table)) > MAX_SAMPLES:
            raise ProfileError(f"the profile has more than {MAX_SAMPLES} samples, locations or texts")
        if min(profile.period, profile.time_nanos, profile.duration_nanos) < 0:
            raise ProfileError("the profile is damaged: its time, duration or period is negative")
        self._samples = profile.sample
        self._texts = texts = dict(enumerate(profile.string_table))  # no entry -1, unlike a list
        texts.setdefault(0, "")
        self.frames: dict[int, Frame] = {}
        try:
            self.values = [(texts[value.type], texts[value.unit]) for value in profile.sample_type]
            functions = {f.id: (texts[f.name], texts[f.filename], f.start_line) for f in profile.function}
            for location in profile.location:
                # Compiled code can have several lines in one place, or none; a Python frame has one.
                (line,) = location.line
                name, file, first_line = functions[line.function_id]
                self.frames[location.id] = Frame(name, file, line.line, first_line)
        except KeyError as error:
            raise ProfileError(f"the profile is damaged: it has no text or function {error}") from None
        except ValueError:
            raise ProfileError("the profile has places that are not one line of one function") from None

    def index(self, value: str) -> int:
        """The place of a value, say "cpu", among those of a sample."""
        names = [name for name, _ in self.values]
        if value not in names:
            there = clean(", ".join(names)) or "none"
            raise ProfileError(f"the profile has no value {value!r}: it has {there}")
        return names.index(value)

    def samples(self, places: Mapping[int, T]) -> Iterator[tuple[tuple[T, ...], tuple[_Label, ...], Values]]:
        """The stack, as what `places` has for each location, the labels and the values of each sample."""
        texts = self._texts
        width = len(self.values)
        for sample in self._samples:
            if len(sample.location_id) > MAX_DEPTH or len(sample.label) > MAX_LABELS:
                raise ProfileError(
                    f"the profile has a stack of more than {MAX_DEPTH} frames, or too many labels"
                )
            values = tuple(sample.value)
            if len(values) != width or min(values, default=0) < 0:
                raise ProfileError("the profile is damaged: a sample has not the values that are listed")
            try:
                stack = tuple(map(places.__getitem__, sample.location_id))
                labels = [(texts[x.key], texts[x.str], x.num, texts[x.num_unit]) for x in sample.label]
            except KeyError as error:
                raise ProfileError(f"the profile is damaged: it has no text or location {error}") from None
            labels.sort()
            yield stack, tuple(labels), values

    def stacks(self) -> Iterator[Stack]:
        """The samples with their frames."""
        for frames, labels, values in self.samples(self.frames):
            yield Stack(frames, values, {key: text or number for key, text, number, _ in labels})


def merge(profiles: Iterable[Profile]) -> Profile:
    """The sum of profiles: samples with equal frames and equal labels are added up.

    The order and the grouping of the profiles do not matter to what the sum says.

    - `time_nanos` is the earliest, and `duration_nanos` reaches from there to the latest end: gaps
      between the profiles belong to it, what overlaps counts once. Profiles without a time count only
      when none has one; the longest duration is kept then.
    - `period` is the longest. A change of the rate does no harm: CPU time stays nanoseconds.
    - A profile without sample types, as an empty message is, adds nothing. Other values than Expanse's
      cannot be added to them: ProfileError, as for a damaged profile.
    - Addresses, mappings, columns and comments are not kept.
    """
    builder = ProfileBuilder(period_ns=0, time_ns=0, duration_ns=0)
    end = longest = 0
    for profile in profiles:
        reader = Reader(profile)
        if not reader.values and not profile.sample:
            continue
        if reader.values != [*VALUES]:
            named = ", ".join(f"{name} in {unit}" for name, unit in reader.values)
            raise ProfileError(f"profiles with other values cannot be added up: {clean(named)}")
        builder.take(reader)
        builder.period_ns = max(builder.period_ns, profile.period)
        longest = max(longest, profile.duration_nanos)
        if profile.time_nanos:
            builder.time_ns = min(builder.time_ns or profile.time_nanos, profile.time_nanos)
            end = max(end, profile.time_nanos + profile.duration_nanos)
    builder.duration_ns = end - builder.time_ns if builder.time_ns else longest
    return builder.build()


def dumps(profile: Profile) -> bytes:
    """The profile as files and servers want it: gzip, the same bytes for the same profile."""
    return zlib.compress(profile.SerializeToString(deterministic=True), 6, wbits=31)


def loads(data: bytes, limit: int = 64 << 20) -> Profile:
    """Read a profile, packed by gzip or plain, of at most `limit` bytes when unpacked.

    Raises ProfileError when it is larger, not a profile, or does not hold together. In memory a profile
    that was made for it takes up to 20 times its size: for strangers' profiles the limit has to be low.
    """
    if data[:2] == b"\x1f\x8b":
        data = _unpacked(data, limit)
    if len(data) > limit:
        raise ProfileError(f"the profile is larger than {limit} bytes")
    try:
        profile = Profile.FromString(data)
    except DecodeError:
        raise ProfileError("this is not a profile in pprof's format") from None
    reader = Reader(profile)
    for _ in reader.samples(reader.frames):
        pass
    return profile


def _unpacked(data: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(wbits=31)
    try:
        unpacked = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise ProfileError(f"the profile is damaged: {error}") from None
    if len(unpacked) <= limit and (not stream.eof or stream.unused_data):
        raise ProfileError("the profile is damaged: its end is missing, or something follows it")
    return unpacked


def hottest(profile: Profile, value: str = "cpu") -> tuple[str, str, int, float] | None:
    """(function, file, line, share) of the line that had most of `value`: the leaf's, or, of "waiting",
    that which the wait is charged to.

    The share, 0 to 1, is of the whole profile. What could not be resolved belongs to the whole and is
    never chosen; None when nothing else is there. Raises ProfileError.
    """
    reader = Reader(profile)
    place = reader.index(value)
    origins = Origins() if value == "waiting" else None
    total = 0
    lines: dict[tuple[str, str, int], int] = {}
    for frames, values, labels in reader.stacks():
        total += values[place]
        if frames and values[place] and UNRESOLVED not in labels:
            name, file, number, _ = frames[origins.charged(frames) if origins else 0]
            lines[name, file, number] = lines.get((name, file, number), 0) + values[place]
    if not lines:
        return None
    name, file, number = min(lines, key=lambda line: (-lines[line], line))
    return name, file, number, lines[name, file, number] / total
