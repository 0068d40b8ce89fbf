from __future__ import annotations

import pytest

from expanse_ebpf.top import columns, plain, table, text
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.rates import snapshot
from expanse_ebpf.top.text import UNKNOWN, Locale
from tests.top.gpu_reports import gpu_report
from tests.top.serving import make_report

EVERYTHING = (
    *("JOB", "NAME", "USER", "CORES", "IPC", "MISS", "SWITCH/S", "WAIT", "MEMORY"),
    *("I/O", "PROCS", "STATE", "PYTHON"),
)


def shown(jobs: int = 3, pmu: bool = True) -> Values:
    return snapshot(make_report(20, jobs, pmu=pmu), make_report(21, jobs, pmu=pmu), 0.1)


def with_gpus(jobs: int = 3) -> Values:
    return snapshot(gpu_report(20, jobs), gpu_report(21, jobs), 0.1)


def titles(output: str) -> list[str]:
    return next(line for line in output.splitlines() if line.startswith("JOB")).split()


def test_table_with_everything() -> None:
    output = plain.render(shown())
    assert titles(output) == list(EVERYTHING)
    first = next(line for line in output.splitlines() if line.startswith("slurm/4411")).split()
    assert first[1:3] == ["resnet50", "user0"]
    figures = ["1.40", "20.0%", "1.5k", "0.05", "700", "MiB", "3.1", "MiB/s", "4", "running"]
    assert first[4:] == [*figures, "Trainer.step0", "model.py:88", "43%"]
    head = output.splitlines()[0]
    assert head.startswith("gpu017 · ")
    assert "3 jobs · cpu 7.00 of 64 cores · memory 56.0 GiB of 256 GiB · load 6.50" in head
    assert "collector 0.008 cores · 41.0 MiB PSS · BPF 112 µs per s" in output
    assert "source network is off: switched off" in output


def test_most_cores_first() -> None:
    lines = plain.render(shown()).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("slurm/")] == [
        "slurm/4413",
        "slurm/4412",
        "slurm/4411",
    ]
    by_name = plain.render(shown(), sort="key").splitlines()
    assert next(line for line in by_name if line.startswith("slurm/")).startswith("slurm/4411")


def test_without_a_pmu_there_is_no_ipc() -> None:
    assert not {"IPC", "MISS"} & set(titles(plain.render(shown(pmu=False))))


def test_unknown_is_a_dash_and_not_zero() -> None:
    output = plain.render(snapshot(None, make_report(1)))
    row = next(line for line in output.splitlines() if line.startswith("slurm/4411"))
    assert row.split()[3] == UNKNOWN
    assert "0.00" not in row


def test_ascii() -> None:
    output = plain.render(snapshot(None, make_report(1)), locale=Locale(ascii=True))
    assert output.isascii()
    row = next(line for line in output.splitlines() if line.startswith("slurm/4411"))
    assert row.split()[3] == "-"


def test_the_line_of_python_is_cut_where_that_hurts_least() -> None:
    def line(
        function: str, file: str | None, number: int | None, share: float | None, width: int = 36
    ) -> str:
        hot = {"function": function, "file": file, "line": number, "share": share}
        found = columns.code_line(hot, width)
        assert len(found) <= width
        return found

    assert line("spin", "/a/b/train.py", 7, 0.431) == "spin train.py:7 43%"
    assert line("spin", None, None, None) == "spin"
    assert line("spin", "/a/x.py", None, 1.0) == "spin x.py 100%"
    assert line("Trainer.step", "/a/train.py", 18, 0.63, 28) == "Trainer.step train.py:18 63%"
    assert line("Trainer.step", "/a/train.py", 18, 0.63, 27) == "step train.py:18 63%"
    assert line("Trainer.step", "/a/train.py", 18, 0.63, 19) == "Trainer.step:18 63%"
    assert line("compress", "/a/codec.py", 7, 0.63, 18) == "compress:7 63%"
    assert line("Trainer.step", "/a/train.py", 18, 0.63, 18) == "step:18 63%"
    assert line("forward_and_backward", "/a/train.py", 188, 0.5, 18) == "forward_a…:188 50%"
    assert "\x1b" not in line("a\x1b[2J", "/a/\x1b.py", 1, 0.5)


def test_python_is_shown_where_there_is_any_and_room() -> None:
    report = make_report(1)
    for job in report.jobs[1:]:
        job.ClearField("python")
    jobs = snapshot(None, report)["jobs"]
    assert "PYTHON" in titles(plain.render(snapshot(None, report)))
    assert next(j["key"] for j in columns.sort(jobs, "python")) == "slurm/4411"
    report.jobs[0].ClearField("python")
    assert "PYTHON" not in titles(plain.render(snapshot(None, report)))


def test_names_do_not_steer_the_terminal() -> None:
    report = make_report(1)
    report.node.name = "n\x1b]0;x\x07"
    report.jobs[0].identity.name = "a\x1b[31m\nb"
    report.jobs[0].identity.id = "1\r2"
    report.jobs[0].identity.user = "u\x9b1m"
    report.jobs[0].python.hottest_function = "f\x1b[2J\n"
    report.collector.sources[1].reason = "r\x1b[1m"
    output = plain.render(snapshot(None, report))
    assert not any(c < " " for c in output if c != "\n")
    assert "\x9b" not in output
    assert sum(line.startswith("slurm/") for line in output.splitlines()) == 3


def test_it_fits_on_any_screen() -> None:
    for width, height in ((20, 5), (1, 1), (80, 24), (40, 8), (200, 60)):
        lines = plain.render(shown(40), width, height).splitlines()
        assert len(lines) <= max(1, height - 1)
        assert max(map(len, lines)) <= width
    lines = plain.render(shown(40), 80, 24).splitlines()
    assert len(lines) == 23
    listed = sum(line.startswith("slurm/") for line in lines)
    assert f"… {40 - listed} more" in lines
    assert titles("\n".join(lines))[:2] == ["JOB", "CORES"]
    tiny = plain.render(shown(40), 20, 5).splitlines()
    assert [line.split()[0] for line in tiny] == ["gpu017", "JOB", "slurm/4450", "…"]


def test_stale_data_says_so() -> None:
    old = snapshot(make_report(20), make_report(21), 17.2)
    output = plain.render(old)
    assert output.startswith("STALE, 17 s old · gpu017")
    assert " stale " in output


def test_no_jobs() -> None:
    assert "no jobs" in plain.render(shown(0))


def test_losses_are_named() -> None:
    report = make_report(1)
    report.collector.events_lost, report.collector.reports_dropped = 7, 3
    for part in ("cycles", "instructions"):
        report.collector.sources[0].unavailable[part] = "no PMU"
    assert plain.trouble(snapshot(None, report))[1:] == [
        "not known: cycles, instructions: no PMU",
        "7 cgroup events lost; the cgroup tree was compared instead",
        "3 reports dropped before the controller took them",
    ]


def test_sort_puts_unknown_last_either_way() -> None:
    jobs = shown()["jobs"]
    jobs[1]["cpu_cores"] = None
    assert [j["id"] for j in columns.sort(jobs, "cpu")] == ["4413", "4411", "4412"]
    assert [j["id"] for j in columns.sort(jobs, "cpu", reverse=True)] == ["4411", "4413", "4412"]
    assert [j["id"] for j in columns.sort(jobs, "key", reverse=True)] == ["4413", "4412", "4411"]


def test_rows_that_look_the_same_do_not_change_places() -> None:
    for cores in ((2.001, 2.002, 2.004), (2.004, 2.002, 2.001)):
        jobs = shown()["jobs"]
        for job, value in zip(jobs, cores, strict=True):
            job["cpu_cores"] = value
        for reverse in (False, True):
            assert [j["id"] for j in columns.sort(jobs, "cpu", reverse)] == ["4411", "4412", "4413"]
    jobs[1]["cpu_cores"] = 2.006  # shown as 2.01
    assert [j["id"] for j in columns.sort(jobs, "cpu")] == ["4412", "4411", "4413"]


def test_columns_give_way_by_rank() -> None:
    jobs = with_gpus()["jobs"]
    for width in range(1, 180):
        chosen, left_out = table.choose(columns.COLUMNS, jobs, width, "cpu")
        names = {c.name for c in chosen}
        assert chosen[0].name == "key"
        assert {"key", "cpu"} <= names
        assert {*chosen, *left_out} == {*columns.COLUMNS}
        if width >= 19:
            assert sum(w + 2 for w in table.widths(chosen, jobs, width).values()) - 2 <= width
        assert "python" in names or not names & {"history", "switches", "wait", "io", "name"}
        assert {"gpus", "gpu", "gpu_memory", "power"} <= names or not names & {"ipc", "miss", "switches"}
        assert {"gpus", "gpu"} <= names or width < 60
        kept, _ = table.choose(columns.COLUMNS, jobs, width, "name")
        assert "name" in {c.name for c in kept}
    assert [c.name for c in table.choose(columns.COLUMNS, jobs, 20, "cpu")[0]] == ["key", "cpu"]
    assert table.choose(columns.COLUMNS, jobs, None) == (list(columns.COLUMNS), [])


def test_a_wide_terminal_gives_the_key_and_the_line_of_python_what_they_need() -> None:
    jobs = shown()["jobs"]
    jobs[0]["key"] = "kubernetes/team/pod-with-a-long-name"
    chosen = [columns.BY_NAME[name] for name in ("key", "cpu", "python")]
    for room, key, python in ((20, 4, 18), (45, 16, 18), (50, 21, 18), (66, 36, 19), (200, 36, 36)):
        widths = table.widths(chosen, jobs, room)
        assert (widths["key"], widths["cpu"], widths["python"]) == (key, 7, python)


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_python_is_seen_on_ordinary_terminals_and_what_is_left_out_is_named(width: int) -> None:
    output = plain.render(shown(), width, 24)
    there = titles(output)
    assert "PYTHON" in there
    assert ("Trainer.step2 model.py:90 43%" if width == 160 else " step2 model.py:90 43%") in output
    left_out = [title for title in EVERYTHING if title not in there]
    said = [line for line in output.splitlines() if line.startswith("not shown for want of room: ")]
    assert said == ([f"not shown for want of room: {', '.join(left_out)}"] if left_out else [])
    assert all(text.cell_width(line) <= width for line in output.splitlines())


def test_what_really_is_printed_counts() -> None:
    wide = max(map(text.cell_width, plain.render(shown(), sort="key").splitlines()[2:6]))
    assert titles(plain.render(shown(), wide, 40)) == list(EVERYTHING)
    assert "NAME" not in titles(plain.render(shown(), wide - 36, 40))


def test_where_little_runs_the_line_that_waits_is_shown() -> None:
    job = shown()["jobs"][0]
    job["python"]["waiting"] = {"function": "T.step", "file": "/srv/train.py", "line": 18, "share": 0.25}
    job["cpu_cores"], job["counters"]["run_queue_wait_cores"] = 0.49, None
    assert columns.python_line(job) == "waiting: T.step train.py:18"
    assert columns.python_line(job, 18) == "waiting: T.step:18"
    assert columns.python_line(job, 17) == "waiting: step:18"
    job["counters"]["run_queue_wait_cores"] = 0.02  # it would run if it could
    assert columns.python_line(job) == "Trainer.step0 model.py:88 43%"
    job["cpu_cores"], job["counters"]["run_queue_wait_cores"] = 0.51, 0.0
    assert columns.python_line(job) == "Trainer.step0 model.py:88 43%"
    job["cpu_cores"] = None
    assert columns.python_line(job) == "Trainer.step0 model.py:88 43%"
    job["cpu_cores"] = 0.1
    job["python"]["waiting"]["file"] = "/usr/lib/python3.11/threading.py"  # an idle pool
    assert columns.python_line(job) == "Trainer.step0 model.py:88 43%"
    job["python"]["hottest"] = None
    assert columns.python_line(job) == "waiting: T.step threading.py:18"


@pytest.mark.parametrize(
    ("reason", "shown_for_it"),
    [("opted out", True), ("not Python", False), ("unsupported interpreter", True)],
)
def test_why_a_job_has_no_line_stands_in_its_place(reason: str, shown_for_it: bool) -> None:
    report = make_report(1)
    for job in report.jobs:
        job.ClearField("python")
        job.unavailable["python"] = reason
    assert (reason in plain.render(snapshot(None, report))) is shown_for_it
    report.jobs[0].python.hottest_function = "f"
    output = plain.render(snapshot(None, report))
    assert sum(line.endswith(reason) for line in output.splitlines()) == 2


def test_filter() -> None:
    job = shown()["jobs"][2]
    for wanted, found in (("МОДЕЛИ", True), ("4413", True), ("USER2", True), ("held", True), ("eval", False)):
        assert columns.matches(job, wanted) is found
