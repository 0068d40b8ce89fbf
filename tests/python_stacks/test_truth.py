"""What is seen of programs whose stacks are known, under every interpreter; docs/python-support.md.

All programs of two interpreters run at the same time, until enough has been seen of each. With
WRITE_PYTHON_SUPPORT=1 in the environment the rows of the interpreters that are here are written anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from expanse_ebpf.python_stacks.sampler import Stack
from tests.python_stacks import interpreters, programs
from tests.python_stacks.driver import Driver, Program, driving, leaves, names, places
from tests.python_stacks.interpreters import Interp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/python-support.md"
WRITE = "WRITE_PYTHON_SUPPORT"
COMMAND = f"{WRITE}=1 .venv/bin/python -m pytest tests/python_stacks/test_truth.py"

RATE = 499
ENOUGH = 40  # samples of a program, and of each child
VISITS = 12  # of the program whose threads wait for the GIL
PATIENCE_S = 90
LONG = "120"  # seconds; programs are ended when enough has been seen of them
SHARES_S = 2.5
MINUTE_S = 60

COLUMNS = ("on a CPU", "waiting", "names", "GIL", "second interpreter")
TEXT = """# Interpreters

Which CPythons were profiled, written by `tests/python_stacks/test_truth.py`. It runs programs whose stacks
are known under every interpreter that it finds on a machine or can make there: those of pyenv and of the
system, Debian's newest, a free-threaded one and a static one with musl. A test fails when an interpreter
does otherwise than this page says; then this writes the rows of those that are there anew:

    {command}

{table}

- on a CPU: every stack of a program that alternates between two chains of calls is one that it can have,
  line by line, and the shares of a program's functions are those that it measures itself, within three
  points.
- waiting: who waits for a batch from a queue is seen in the line that takes it, with its callers.
- names: qualified, as in `Modèle.avancer`, or plain, as in `avancer`: code objects have had the former
  since 3.11.
- GIL: who holds it, waits for it and has let it go is told apart. A free-threaded interpreter has none.
  "-": the programs for that do not run there, for want of a module.
- second interpreter: a thread in another interpreter of its process is seen there.

Each also had: recursion deeper than can be read, names and files of every width of characters, coroutines
and generators that were entered and thrown into, line tables of more than 64 KiB, functions that are made
and thrown away all the time, forked children, fifty parked threads, and a process whose main thread has
ended.

Versions from 3.8 to 3.15 can be read, on x86-64 and arm64; an interpreter whose memory is not as its
version says is told as `unsupported`, and never guessed at. From 3.13 on the interpreter says itself where
things are; builds of earlier ones with unusual options, such as `--with-trace-refs`, are unsupported. The
layouts of free-threaded 3.14 and 3.15 come from their headers: such a build was never run here, 3.13's was.
"""

ARGUMENTS = {
    "SHALLOW": (programs.RECURSION, "60"),
    "DEEP": (programs.RECURSION, "500"),
    "FULL": (programs.BIG_STACK, "128"),
    "PAST": (programs.BIG_STACK, "129"),
}
PROGRAMS = (
    *("ALTERNATING", "DEEP", "SHALLOW", "NON_ASCII", "LEADER_GONE", "COROUTINES", "QUEUE_WAIT", "GIL"),
    *("FULL", "PAST", "LONG_TABLE", "DYNAMIC", "SUBINTERPRETER", "FORKS", "PARKED"),
)


class Seen(NamedTuple):
    """Of one program, after it was ready."""

    pid: int
    lines: list[str]  # that it wrote
    running: Counter[Stack]
    waiting: Counter[Stack]
    children: list[Counter[Stack]]


class Recording:
    """What was seen of every program under some interpreters."""

    def __init__(self, interps: Iterable[Interp]) -> None:
        self.seen: dict[tuple[str, str], Seen] = {}
        self.resolved = 0
        self.unresolved: Counter[str] = Counter()  # after the programs were ready
        interps = list(interps)
        with driving(rate_hz=RATE, waits_hz=4) as driver:
            self._shares(driver, interps)
            # A free-threaded 3.13 yields the CPU forty times for each class that it makes, and the scheduler
            # lets all others of its session make up for that first. So it is on its own.
            alone = [interp for interp in interps if interp.free_threaded]
            others = [interp for interp in interps if not interp.free_threaded]
            for batch in (*([interp] for interp in alone), *zip(others[::2], others[1::2], strict=False)):
                self._batch(driver, batch)
            if len(others) % 2:
                self._batch(driver, others[-1:])
            for program in driver.programs:
                program.close()
            driver.drain()
            self.samples, self.counted = driver.sampler.samples(0), driver.total[0]
            self.unavailable = dict(driver.sampler.unavailable)

    def _shares(self, driver: Driver, interps: list[Interp]) -> None:
        """One on each CPU, with nearly all of it: so little is left to chance."""
        cpus = sorted(os.sched_getaffinity(0))
        for first in range(0, len(interps), len(cpus)):
            running = {}
            for interp, cpu in zip(interps[first:], cpus, strict=False):
                own = ["taskset", "-c", str(cpu), "nice", "-n", "-15"]
                running[interp] = driver.start(
                    [*own, *interp.run(programs.SHARES, str(SHARES_S))], session=True
                )
            driver.until_ended(*running.values(), seconds=PATIENCE_S)
            for interp, program in running.items():
                self._keep(driver, interp, "SHARES", program)
            driver.forget()

    def _batch(self, driver: Driver, interps: Sequence[Interp]) -> None:
        running = {}
        for name in PROGRAMS:
            text, *arguments = ARGUMENTS.get(name) or (getattr(programs, name),)
            for interp in interps:
                if (interp.name, name) not in missing(interps):
                    running[interp, name] = driver.start(
                        interp.run(text, LONG, *arguments), session=interp.free_threaded
                    )
        driver.until_ready(*running.values(), seconds=PATIENCE_S)
        driver.forget()
        few: list[tuple[str, str]] = []

        def enough() -> bool:
            few[:] = [
                (interp.name, name)
                for (interp, name), program in running.items()
                if any(driver.running[pid] < ENOUGH for pid in _spinning(name, program))
                or (name == "GIL" and driver.waiting[program.pid] < VISITS)
                or (name == "QUEUE_WAIT" and not _waits(driver.seen(program.pid, waiting=True)))
            ]
            return not few

        assert driver.run(PATIENCE_S, enough), f"hardly seen: {few}"
        for (interp, name), program in running.items():
            self._keep(driver, interp, name, program)
            program.close()
        driver.drain()
        self.resolved += driver.running.total()
        self.unresolved += driver.unresolved()
        driver.forget()

    def _keep(self, driver: Driver, interp: Interp, name: str, program: Program) -> None:
        pid = program.pid
        children = [driver.seen(child) for child in _spinning(name, program)] if name == "FORKS" else []
        self.seen[interp.name, name] = Seen(
            pid, program.lines(), driver.seen(pid), driver.seen(pid, waiting=True), children
        )


def missing(interps: Iterable[Interp]) -> set[tuple[str, str]]:
    """Programs that cannot run under some interpreters: a static one has no ctypes and no hashes."""
    return {(interp.name, name) for interp in interps if interp.musl for name in ("LEADER_GONE", "GIL")}


def _waits(counts: Counter[Stack]) -> bool:
    """Whether both threads of QUEUE_WAIT were seen where they wait."""
    return {"get", "produce"} <= {name.rpartition(".")[2] for stack in counts for name in names(stack)}


def _spinning(name: str, program: Program) -> list[int]:
    """Processes of the program that use a CPU all the time."""
    if name == "FORKS":
        return [int(word) for word in program.words]
    return [program.pid] if name != "QUEUE_WAIT" else []


@pytest.fixture(scope="module")
def minute() -> Iterator[Driver]:
    """A minute of the program that alternates, which goes on while the others run."""
    with driving(rate_hz=99) as driver:
        interp = interpreters.interpreter("3.11 system")
        program = driver.start(["nice", "-n", "-10", *interp.run(programs.ALTERNATING, str(MINUTE_S))])
        driver.until_ready()
        driver.forget()
        thread = threading.Thread(
            target=driver.until_ended, name="minute", args=(program,), kwargs={"seconds": 2 * MINUTE_S}
        )
        thread.start()
        yield driver
        thread.join()


@pytest.fixture(scope="module")
def recording(minute: Driver, request: pytest.FixtureRequest) -> Recording:
    wanted = {
        item.callspec.params.get("interp") for item in request.session.items if hasattr(item, "callspec")
    }
    return Recording(interpreters.interpreter(name) for name in interpreters.names() if name in wanted)


def own(counts: Counter[Stack], *last: str) -> Counter[Stack]:
    """Those whose innermost function is one of these."""
    return Counter({stack: samples for stack, samples in counts.items() if stack.frames[0].name in last})


def qualified(interp: Interp, name: str) -> str:
    """A function's name as this interpreter knows it."""
    return name if interp.minor >= 11 else name.rpartition(".")[2]


# ---- on a CPU


def test_shares_are_those_that_the_program_measured(interp: Interp, recording: Recording) -> None:
    seen = recording.seen[interp.name, "SHARES"]
    measured = dict(zip(("fifty", "thirty", "twenty"), map(float, seen.lines[-1].split()), strict=True))
    counts = own(seen.running, *measured)
    assert counts.total() > 50
    call = programs.line(programs.SHARES, "work(until)")
    for stack in counts:
        module, (name, _) = places(stack)
        assert module == ("<module>", call)
        assert stack.python == f"3.{interp.minor}{'t' if interp.free_threaded else ''}"
        first = programs.line(programs.SHARES, f"def {name}(")
        assert stack.frames[0].first_line == first
        # The instruction with which a call begins has the line of the `def` itself.
        assert stack.frames[0].line in (first, first + 1, first + 2)
        assert stack.frames[0].file == "<string>"
    for name, share in measured.items():
        points = 0.03
        if counts.total() < 0.8 * SHARES_S * RATE:
            # It had to share the CPU: then whom a sample meets is a matter of chance.
            points += 3 * (share * (1 - share) / counts.total()) ** 0.5
        assert leaves(counts)[name] / counts.total() == pytest.approx(share, abs=points)
    # Nothing else takes time once it has begun; the rest is the start and the end of the interpreter.
    assert counts.total() > 0.7 * seen.running.total()


def possible(program: str) -> set[tuple[tuple[str, int], ...]]:
    """The stacks of the program that alternates, whole."""
    found: set[tuple[tuple[str, int], ...]] = set()
    for x in "ab":
        within = programs.line(program, f"def leaf_{x}(")
        outer = (
            ("<module>", programs.line(program, f"hot_{x}(1)")),
            (f"hot_{x}", programs.line(program, f"return leaf_{x}(x)")),
        )
        hot = programs.line(program, f"def hot_{x}(")
        for line in (within, within + 1, within + 2):
            found.add((*outer, (f"leaf_{x}", line)))
        for line in (hot, hot + 1):
            found.add((outer[0], (f"hot_{x}", line)))
        found.add(outer[:1])
    for text in ("while time.monotonic() < end:", "for _ in range(200):"):
        found.add((("<module>", programs.line(program, text)),))
    return found


def test_no_stack_is_impossible(interp: Interp, recording: Recording) -> None:
    seen = recording.seen[interp.name, "ALTERNATING"]
    assert {places(stack) for stack in seen.running} <= possible(programs.ALTERNATING)
    hot = leaves(seen.running)
    assert min(hot["leaf_a"], hot["leaf_b"]) > 0.15 * seen.running.total()


def test_stacks_are_cut_at_their_outer_end(interp: Interp, recording: Recording) -> None:
    seen = recording.seen[interp.name, "DEEP"]
    (spin,) = {place for stack in seen.running for place in places(stack)[-1:]}
    assert spin == ("spin", programs.line(programs.RECURSION, "while time.monotonic() < end: pass"))
    for stack in seen.running:
        assert stack.truncated
        assert names(stack) == ("recurse",) * 127 + ("spin",)


def test_a_stack_that_fits_is_whole(interp: Interp, recording: Recording) -> None:
    seen = recording.seen[interp.name, "SHALLOW"]
    again, last = (
        programs.line(programs.RECURSION, text) for text in ("recurse(depth - 1)", "        spin()")
    )
    for stack in seen.running:
        assert not stack.truncated
        assert names(stack) == ("<module>", "train_epoch", *("recurse",) * 60, "spin")
        assert [line for _, line in places(stack)[2:-1]] == [again] * 59 + [last]


@pytest.mark.parametrize(("name", "truncated"), [("FULL", False), ("PAST", True)])
def test_the_longest_stack_is_not_taken_for_a_longer_one(
    name: str, truncated: bool, interp: Interp, recording: Recording
) -> None:
    depth = int(ARGUMENTS[name][1])
    whole = ("<module>", *(f"level_{k}" for k in range(1, depth)))
    for stack in recording.seen[interp.name, name].running:
        assert names(stack) == whole[-128:]
        assert stack.truncated == truncated


def test_names_of_every_width(interp: Interp, recording: Recording) -> None:
    chain = [
        *(("été", "/tmp/é.py"), ("Modèle.avancer", "/tmp/é.py")),
        *(("Modèle.avancer.<locals>.训练", "/tmp/é.py"), ("训练.步", "/tmp/中.py")),
        *(("𠀋", "/tmp/😀.py"), ("😀", "/tmp/😀.py")),
    ]
    expected = [("<module>", "<string>"), *((qualified(interp, name), file) for name, file in chain)]
    for stack in recording.seen[interp.name, "NON_ASCII"].running:
        assert [(frame.name, frame.file) for frame in reversed(stack.frames)] == expected


def test_coroutines_and_generators_are_called_by_who_waits_for_them(
    interp: Interp, recording: Recording
) -> None:
    counts = recording.seen[interp.name, "COROUTINES"].running
    good: Counter[int | None] = Counter()
    for stack, samples in counts.items():
        if names(stack)[-4:] == ("main", "fetch", "collect", "ids"):
            good[stack.frames[0].line] += samples
    # 95 %, and what chance makes of that in so many samples.
    assert good.total() >= 0.95 * counts.total() - 3 * (0.95 * 0.05 * counts.total()) ** 0.5
    spinning = [
        programs.line(programs.COROUTINES, text) for text in ("pass  # entered", "pass  # thrown into")
    ]
    assert all(good[line] > 0.2 * good.total() for line in spinning)
    assert {stack.frames[-1].name for stack in counts} == {"<module>"}


def test_code_that_comes_to_lie_where_other_code_was(interp: Interp, recording: Recording) -> None:
    counts = recording.seen[interp.name, "DYNAMIC"].running
    hot = [stack for stack in counts if stack.frames[0].name.startswith("leaf_")]
    assert len(hot) > 3
    for stack in hot:
        module, gen, leaf = reversed(stack.frames)
        k = int(leaf.name.removeprefix("leaf_"))
        assert (gen.name, gen.file, gen.line) == (f"gen_{k}", f"gen_{k}.py", k + 1)
        assert (leaf.file, leaf.line, leaf.first_line) == (f"gen_{k}.py", k + 3, k + 2)
        assert (module.name, module.line) == (
            "<module>",
            programs.line(programs.DYNAMIC, "gen(time.monotonic()"),
        )


def test_a_line_far_into_a_long_table(interp: Interp, recording: Recording) -> None:
    seen = recording.seen[interp.name, "LONG_TABLE"]
    _, last, length = map(int, seen.lines[0].split())
    assert length > 65536
    counts = own(seen.running, "long")
    assert {(frame.file, frame.line) for frame in (stack.frames[0] for stack in counts)} == {
        ("long_table.py", last)
    }


def test_a_thread_in_another_interpreter_of_its_process(interp: Interp, recording: Recording) -> None:
    counts = recording.seen[interp.name, "SUBINTERPRETER"].running
    inside = {stack for stack in counts if "inner" in names(stack)}
    assert {names(stack) for stack in inside} == {("<module>", "outer", "inner")}
    # The main thread asks for the GIL, which both interpreters share before 3.12, again and again.
    assert sum(counts[stack] for stack in inside) > 0.5 * counts.total()


def test_forked_children_run_what_they_run(interp: Interp, recording: Recording) -> None:
    for k, counts in enumerate(recording.seen[interp.name, "FORKS"].children):
        assert {names(stack) for stack in counts} == {("<module>", "start", f"work_{k}")}


def test_threads_that_are_parked_are_no_work(interp: Interp, recording: Recording) -> None:
    seen = recording.seen[interp.name, "PARKED"]
    assert {stack for stack in seen.running if "park" in names(stack)} == set()
    parked = sum(samples for stack, samples in seen.waiting.items() if "park" in names(stack))
    assert parked > 0.9 * seen.waiting.total()


def test_a_process_whose_main_thread_has_ended(interp: Interp, recording: Recording) -> None:
    if (interp.name, "LEADER_GONE") in missing([interp]):
        return
    counts = recording.seen[interp.name, "LEADER_GONE"].running
    assert {names(stack)[-1] for stack in counts} == {"work"}


# ---- waiting, and the GIL


def test_threads_that_wait_are_seen_where_they_wait(interp: Interp, recording: Recording) -> None:
    counts = recording.seen[interp.name, "QUEUE_WAIT"].waiting
    train, get, put = (
        programs.line(programs.QUEUE_WAIT, text)
        for text in ("for batch in loader:", "self.batches.get()", "time.sleep(0.05)")
    )
    outer = {places(stack)[1:3] for stack in counts if stack.frames[-1].name == "<module>"}
    assert (("train", train), (qualified(interp, "DataLoader.__next__"), get)) in outer
    assert ("produce", put) in {places(stack)[-1] for stack in counts}


def test_who_holds_the_gil(interp: Interp, recording: Recording) -> None:
    if (interp.name, "GIL") in missing([interp]):
        return
    seen = recording.seen[interp.name, "GIL"]
    found: dict[str, Counter[str]] = {}
    for counts in (seen.running, seen.waiting):
        for stack, samples in counts.items():
            found.setdefault(stack.frames[0].name, Counter())[stack.gil] += samples
    if interp.free_threaded:
        assert {state for states in found.values() for state in states} == {""}
        return
    assert found["spin"].keys() == {"held"}
    assert found["wait"]["waiting"] >= 0.8 * found["wait"].total() > 0
    assert found["nap"].keys() == {"released"}
    assert found["digest"].keys() == {"released"}


# ---- all together


def test_every_sample_is_accounted_for(recording: Recording) -> None:
    assert recording.samples == recording.counted > 0
    assert not recording.unavailable
    broken = sum(recording.unresolved[reason] for reason in ("changed", "unreadable", "lost", "over_budget"))
    assert broken < 0.02 * recording.resolved


# ---- the document


class Document:
    """docs/python-support.md: a row for each interpreter, by its name in tests."""

    def __init__(self, text: str) -> None:
        self.rows: dict[str, tuple[str, ...]] = {}
        _, _, rest = text.partition(self._line(("interpreter", "version", *COLUMNS)))
        for line in rest.splitlines()[2:]:
            if not line.startswith("|"):
                break
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            self.rows[name] = tuple(cells)

    def __str__(self) -> str:
        titles = ("interpreter", "version", *COLUMNS)
        rows = ((name, *self.rows[name]) for name in sorted(self.rows, key=by_version))
        lines = map(self._line, (titles, ("---",) * len(titles), *rows))
        return TEXT.format(command=COMMAND, table="\n".join(lines))

    @staticmethod
    def _line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"


def by_version(name: str) -> tuple[int, str]:
    """Sorts the names of interpreters: 3.9 before 3.10, and those without a number last."""
    found = re.match(r"3\.(\d+) ", name)
    return (int(found[1]) if found else 99, name)


def cells(interp: Interp, recording: Recording) -> tuple[str, ...]:
    """What was seen, as in COLUMNS."""

    def yes(right: bool) -> str:
        return "yes" if right else "no"

    def seen(program: str) -> Seen:
        return recording.seen[interp.name, program]

    alternating = {places(stack) for stack in seen("ALTERNATING").running}
    gets = {name.rpartition(".")[2] for stack in seen("QUEUE_WAIT").waiting for name in names(stack)}
    wide = {name for stack in seen("NON_ASCII").running for name in names(stack)}
    if (interp.name, "GIL") in missing([interp]):
        gil = "-"
    else:
        states = {stack.gil for counts in seen("GIL")[2:4] for stack in counts}
        gil = "none" if states == {""} else yes(states == {"held", "waiting", "released"})
    return (
        yes(0 < len(alternating & possible(programs.ALTERNATING)) == len(alternating)),
        yes({"get", "__next__", "train"} <= gets),
        "qualified" if "Modèle.avancer" in wide else "plain",
        gil,
        yes(any("inner" in names(stack) for stack in seen("SUBINTERPRETER").running)),
    )


def test_an_interpreter_does_what_the_document_says(
    interp: Interp, recording: Recording, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["interp"]
    document = Document(DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else "")
    now = cells(interp, recording)
    if os.environ.get(WRITE):
        script = "import platform; print(platform.python_version())"
        version = subprocess.run(
            interp.run(script), capture_output=True, text=True, check=True
        ).stdout.strip()
        document.rows[name] = (version, *now)
        DOCUMENT.write_text(str(document), encoding="utf-8")
        return
    # Another machine may have other ones: those are checked by the other tests.
    if name in document.rows:
        said = dict(zip(COLUMNS, document.rows[name][1:], strict=True))
        assert dict(zip(COLUMNS, now, strict=True)) == said, f"if the interpreter is right: {COMMAND}"


def test_the_document_is_as_this_file_writes_it() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert str(Document(text)) == text, f"{DOCUMENT.relative_to(ROOT)} was changed by hand: {COMMAND}"


def test_rows_of_interpreters_that_are_not_here_stay() -> None:
    document = Document("")
    document.rows["3.10 pyenv"] = ("3.10.1", *("yes",) * 5)
    document.rows["musl"] = ("3.11.2", *("no",) * 5)
    document = Document(str(document))
    document.rows["3.9 pyenv"] = ("3.9.9", *("-",) * 5)
    again = Document(str(document))
    assert list(again.rows.items()) == [
        ("3.9 pyenv", ("3.9.9", *("-",) * 5)),
        ("3.10 pyenv", ("3.10.1", *("yes",) * 5)),
        ("musl", ("3.11.2", *("no",) * 5)),
    ]


# ---- a minute


def test_a_minute_without_an_impossible_stack(minute: Driver, recording: Recording) -> None:
    """Beside all the others, so that it is interrupted at all times."""
    for thread in threading.enumerate():
        if thread.name == "minute":
            thread.join()
    counts = minute.seen()
    inside = Counter({stack: n for stack, n in counts.items() if names(stack)[0] == "<module>"})
    assert {places(stack) for stack in inside if len(stack.frames) <= 3} <= possible(programs.ALTERNATING)
    assert inside.total() > 500
    # The rest is the end of the interpreter, if anything.
    assert counts.total() - inside.total() <= 0.02 * counts.total()
    assert minute.unresolved().total() <= 0.02 * counts.total()
    assert minute.total[0] == minute.sampler.samples(0)
