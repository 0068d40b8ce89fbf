from __future__ import annotations

from expanse_ebpf.top import columns, plain
from expanse_ebpf.top.rates import Values, snapshot
from expanse_ebpf.top.text import UNKNOWN, Locale
from tests.top.serving import make_report

EVERYTHING = (
    *("JOB", "NAME", "USER", "CORES", "IPC", "MISS", "SWITCH/S", "WAIT", "MEMORY"),
    *("I/O", "PROCS", "STATE", "PYTHON"),
)


def shown(jobs: int = 3, pmu: bool = True) -> Values:
    return snapshot(make_report(20, jobs, pmu=pmu), make_report(21, jobs, pmu=pmu), 0.1)


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
    def line(function: str, file: str | None, number: int | None, share: float | None) -> str:
        return columns.hot_line({"function": function, "file": file, "line": number, "share": share})

    assert line("spin", "/a/b/train.py", 7, 0.431) == "spin train.py:7 43%"
    assert line("spin", None, None, None) == "spin"
    assert line("spin", "/a/x.py", None, 1.0) == "spin x.py 100%"
    long = line("Trainer.<locals>.forward_and_backward_and_step", "/a/" + "m" * 60 + ".py", 123456, 0.5)
    assert long.endswith("…:123456 50%")
    assert long.startswith("Trai")
    assert len(long) <= columns.PYTHON_WIDTH
    assert columns.hot_line(None) == UNKNOWN
    assert "\x1b" not in line("a\x1b[2J", "/a/\x1b.py", 1, 0.5)


def test_python_is_shown_where_there_is_any_and_room() -> None:
    report = make_report(1)
    for job in report.jobs[1:]:
        job.ClearField("python")
    jobs = snapshot(None, report)["jobs"]
    assert "PYTHON" in titles(plain.render(snapshot(None, report)))
    assert next(j["key"] for j in columns.sort(jobs, "python")) == "slurm/4411"
    assert "python" not in {c.name for c in columns.choose(jobs, 110, history=False)}
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


def test_columns_give_way_by_rank() -> None:
    jobs = shown()["jobs"]
    for width in range(1, 140):
        chosen = columns.choose(jobs, width, history=True)
        assert chosen[0].name == "key"
        assert len(chosen) == 1 or columns.total_width(chosen, jobs) <= width
    assert [c.name for c in columns.choose(jobs, 20, history=True)] == ["key", "cpu"]
    assert len(columns.choose(jobs, None, history=True)) == len(columns.COLUMNS)


def test_filter() -> None:
    job = shown()["jobs"][2]
    for wanted, found in (("МОДЕЛИ", True), ("4413", True), ("USER2", True), ("held", True), ("eval", False)):
        assert columns.matches(job, wanted) is found
