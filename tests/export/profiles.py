"""Profiles for tests: one whose shares are known, one that is hostile, and whatever Hypothesis thinks of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from expanse_ebpf.export import pprof
from expanse_ebpf.wire.profile_pb2 import Profile

SECOND = 10**9
PERIOD = 10_000_000  # 100 Hz
BEGIN = 1_764_511_200 * SECOND  # 2025-11-30 14:00:00 UTC
OWN = "/home/anna/train.py"
LABELS = {"pid": 4242, "job": "slurm/123", "user": "anna", "python": "3.11"}

# What a program can call its functions and files.
HOSTILE = [
    "</script><script>window.harmed=1</script>",
    "<img src=x onerror=window.harmed=1>",
    "<!--<script>",
    "{{data}}{{title}}",
    '"; window.harmed=1; "',
    "${window.harmed=1}\\u003c\\",
    "a;b\nc\td 12",
    "\u2028\u2029\u202e\x1b[31m\0",
    "&lt;b&gt;",
    "__proto__",
    "[lost]",
    "长" * 3000,
]

# Says nothing about time, which belongs to the machine.
unhurried = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])

names = st.one_of(
    st.sampled_from(["main", "<module>", "Model.forward", "f.<locals>.<lambda>", *HOSTILE]),
    st.text(max_size=8),
)
lines = st.integers(0, 1 << 33)
frames = st.tuples(names, names, lines, lines)
amounts = st.integers(0, 1 << 62)
labels = st.dictionaries(
    st.sampled_from(["pid", "job", "user", "gil", "node", "unresolved", "truncated", ""]),
    st.one_of(names, st.integers(-(1 << 63), (1 << 63) - 1)),
    max_size=3,
)
samples = st.lists(
    st.tuples(st.lists(frames, max_size=5), st.tuples(amounts, amounts, amounts), labels), max_size=6
)
times = st.sampled_from([0, 1, BEGIN, BEGIN + 30 * SECOND, BEGIN + 60 * SECOND, (1 << 63) - 1])
durations = st.sampled_from([0, 10 * SECOND, 60 * SECOND, (1 << 63) - 1])


def builder(time_ns: int = BEGIN, duration_ns: int = 10 * SECOND) -> pprof.ProfileBuilder:
    return pprof.ProfileBuilder(period_ns=PERIOD, time_ns=time_ns, duration_ns=duration_ns)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    made = pprof.ProfileBuilder(
        period_ns=draw(st.sampled_from([0, PERIOD, 20_408_163])),
        time_ns=draw(times),
        duration_ns=draw(durations),
    )
    for stack, values, texts in draw(samples):
        made.add(stack, values, texts)
    return made.build()


@st.composite
def damaged(draw: st.DrawFn) -> Profile:
    """Well-formed messages whose numbers point anywhere."""
    number = st.integers(-2, 6)
    place = st.integers(0, 4)
    made = Profile(string_table=draw(st.lists(names, max_size=5)), **dict.fromkeys(["period"], draw(number)))
    made.time_nanos, made.duration_nanos = draw(number), draw(number)
    for name, unit in pprof.VALUES[: draw(st.sampled_from([3, 3, 3, 1]))]:
        made.sample_type.add(type=_text(made, name), unit=_text(made, unit))
    for _ in range(draw(place)):
        made.function.add(id=draw(place), name=draw(number), filename=draw(number), start_line=draw(number))
    for _ in range(draw(place)):
        location = made.location.add(id=draw(place))
        for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2]))):
            location.line.add(function_id=draw(place), line=draw(number))
    for _ in range(draw(place)):
        values = draw(st.lists(number, min_size=2, max_size=3))
        sample = made.sample.add(location_id=draw(st.lists(place, max_size=3)), value=values)
        if draw(st.booleans()):
            sample.label.add(key=draw(number), str=draw(number), num=draw(number))
    return made


def _text(profile: Profile, text: str) -> int:
    if not profile.string_table:
        profile.string_table.append("")
    profile.string_table.append(text)
    return len(profile.string_table) - 1


def says(profile: Profile) -> tuple[object, ...]:
    """Everything that a profile says, whatever the order of its tables."""
    found: dict[object, Counter[int]] = {}
    for stack, values, texts in pprof.Reader(profile).stacks():
        counts = found.setdefault((stack, frozenset(texts.items())), Counter())
        counts.update(dict(enumerate(values)))
    header = (profile.period, profile.time_nanos, profile.duration_nanos)
    return header, {key: tuple(counts[place] for place in range(3)) for key, counts in found.items()}


def known() -> Profile:
    """On CPUs fast 50, mid 30, slow 20 and 6 + 3 without a stack; 40 visits while it waited for data."""
    made = builder()
    main = [("main", OWN, 52, 40), ("<module>", OWN, 60, 1)]
    for name, line, count in (("fast", 10, 30), ("fast", 11, 20), ("mid", 20, 30), ("slow", 30, 20)):
        made.add([(name, OWN, line, line // 10 * 10), *main], (count, count * PERIOD, 0), LABELS)
    library = "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
    waiting = [("wait", "/usr/lib/python3.11/threading.py", 327, 300), ("_next_data", library, 1317, 1310)]
    made.add([*waiting, ("main", OWN, 48, 40), main[1]], (40, 0, 10 * SECOND), {**LABELS, "pid": 4243})
    for name, count in (("native thread", 6), ("lost", 3)):
        reason = {"job": "slurm/123", "unresolved": name.replace(" ", "_")}
        made.add([(f"[{name}]", "", 0, 0)], (count, count * PERIOD, 0), reason)
    return made.build()


def hostile() -> Profile:
    made = builder()
    for number, name in enumerate(HOSTILE, 1):
        stack = [(name, name, 1, 1), ("caller of " + name, "/x/" + name, 2, 1)]
        made.add(stack, (number, number * PERIOD, SECOND), {"job": name, "pid": number})
    return made.build()


def of(
    stacks: Iterable[tuple[str, int]], label: Callable[[int], dict[str, str | int]] = lambda _: {}
) -> Profile:
    """From stacks like "main;work", each with its number of samples on a CPU."""
    made = builder()
    for number, (stack, count) in enumerate(stacks):
        frames = [(name, f"/x/{name}.py", 1, 1) for name in reversed(stack.split(";"))]
        made.add(frames, (count, count * PERIOD, 0), label(number))
    return made.build()
