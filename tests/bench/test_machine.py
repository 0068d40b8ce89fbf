"""What is told of a machine by its files: bare metal, virtual machines, arm64, and files that are missing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.bench import machine
from expanse_ebpf.bench import machine_texts as texts
from expanse_ebpf.bench.results import line as as_line
from expanse_ebpf.bench.results import parse
from tests.stand_ins.nvml import StandIn

STAT = "cpu  {} 0 100 {} 50 20 10 {} 0 0\ncpu0 9 9 9 9 9 9 9 9 0 0\nintr 1 2\n"
XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R)  Platinum 8480+
cpu MHz\t\t: 2000.000
flags\t\t: fpu vme aperfmperf pni
processor\t: 1
model name\t: Intel(R) Xeon(R)  Platinum 8480+
cpu MHz\t\t: 3000.500
flags\t\t: fpu vme aperfmperf pni
"""
VM = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
cpu MHz\t\t: 2300.000
flags\t\t: fpu vme pni hypervisor lahf_lm
"""
GH200 = """processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd evtstrm aes sve
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f
CPU revision\t: 0
"""
NEW_ARM = GH200.replace("0xd4f", "0xdff")
DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jul 1 00:00:00 UTC 2025\n"
    "GCC version: gcc 12.2.0\n"
)
OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  550.54.14  Release Build  (user@host)  Fri\n"
)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (XEON, "Intel(R) Xeon(R) Platinum 8480+"),
        (GH200, "Arm Neoverse V2"),
        (NEW_ARM, "CPU of maker 0x41, part 0xdff"),
        ("CPU implementer : what\nCPU part : \n", None),
        ("", None),
    ],
)
def test_a_cpu_is_named_on_every_architecture(cpuinfo: str, name: str | None) -> None:
    assert texts.cpu_model(cpuinfo) == name


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"cpuinfo": XEON, "maker": "Dell Inc.", "product": "PowerEdge"}, ""),
        ({"cpuinfo": XEON}, ""),
        ({"cpuinfo": VM, "maker": "Amazon EC2", "product": "m7i.large"}, "amazon"),
        ({"cpuinfo": GH200, "maker": "Amazon EC2", "product": "c7g.metal\n"}, ""),
        ({"cpuinfo": GH200, "maker": "Amazon EC2", "product": "c7g.large"}, "amazon"),
        ({"cpuinfo": VM, "maker": "Microsoft Corporation", "product": "Virtual Machine\n"}, "microsoft"),
        ({"cpuinfo": VM, "maker": "QEMU", "product": "Standard PC", "clocks": "kvm-clock tsc"}, "kvm"),
        ({"cpuinfo": VM, "maker": "QEMU", "product": "Standard PC", "clocks": "tsc"}, "qemu"),
        ({"cpuinfo": VM, "hypervisor": "xen\n"}, "xen"),
        ({"cpuinfo": GH200, "hypervisor": "linux,kvm\0"}, "kvm"),
        ({"cpuinfo": VM, "clocks": "tsc hyperv_clocksource_tsc_page acpi_pm\n"}, "microsoft"),
        ({"cpuinfo": VM}, "unknown"),
        ({"cpuinfo": GH200, "maker": "NVIDIA", "product": "GH200 P3880"}, ""),
        ({"cpuinfo": GH200}, None),
        ({"cpuinfo": ""}, None),
    ],
)
def test_a_hypervisor_is_known_by_what_it_leaves_to_see(given: dict[str, str], kind: str | None) -> None:
    assert texts.virtualised(**given) == kind


@pytest.mark.parametrize(
    ("cpuinfo", "khz", "mhz"),
    [
        (XEON, ["1000000"], 2500.25),
        (GH200, ["3400000\n", "3000000\n", "", "nonsense"], 3200.0),
        (VM, [], None),  # the nominal frequency is none that was measured
        (VM, ["2100000"], 2100.0),
        ("", [], None),
    ],
)
def test_a_frequency_counts_where_the_kernel_measures_it(
    cpuinfo: str, khz: list[str], mhz: float | None
) -> None:
    assert texts.frequency_mhz(cpuinfo, khz) == mhz


@pytest.mark.parametrize(
    ("sensors", "degrees"),
    [
        ([("coretemp", "61000\n"), ("coretemp", "64500\n"), ("nvme", "80000\n")], 64.5),
        ([("x86_pkg_temp\n", "55000"), ("acpitz", "90000")], 55.0),
        ([("acpitz", "41000"), ("mlx5", "70000")], 70.0),
        ([("acpitz", "0"), ("acpitz", "-273000"), ("acpitz", "99999999"), ("acpitz", "")], None),
        ([], None),
    ],
)
def test_the_hottest_sensor_is_one_of_the_cpus_if_there_are_any(
    sensors: list[tuple[str, str]], degrees: float | None
) -> None:
    assert texts.temperature_c(sensors) == degrees


@pytest.mark.parametrize(
    ("stat", "seconds"),
    [
        (STAT.format(500, 1000, 30), (630, 30, 1710)),
        ("cpu 1 2 3 4 5 6 7\n", None),
        ("cpu0 1 2 3 4 5 6 7 8\n", None),
        ("cpu 1 2 3 4 5 6 -7 8\n", None),
        ("", None),
    ],
)
def test_the_time_of_all_cpus_is_busy_stolen_or_neither(
    stat: str, seconds: tuple[int, int, int] | None
) -> None:
    rate = os.sysconf("SC_CLK_TCK")
    wanted = texts.Ticks(*(each / rate for each in seconds)) if seconds else None
    found = texts.ticks(stat)
    assert (found is None) == (wanted is None)
    if found and wanted:
        assert (found.busy_s, found.stolen_s) == pytest.approx((wanted.busy_s, wanted.stolen_s))
        assert found.total_s == pytest.approx(wanted.total_s)


@pytest.mark.parametrize(
    ("before", "after", "excluded", "wanted"),
    [
        ((10, 1, 100), (16, 2, 120), 4.0, (0.05, 0.2)),
        ((10, 1, 100), (16, 1, 120), 7.0, (0.0, 0.0)),  # a tick too few in /proc/stat
        ((10, 5, 100), (16, 4, 120), 4.0, (None, 0.2)),
        ((10, 1, 100), (9, 1, 120), 0.0, (0.0, None)),
        ((10, 1, 100), (10, 1, 100), 0.0, (None, 0.0)),
    ],
)
def test_what_others_took_is_what_nobody_here_did(
    before: tuple[float, float, float],
    after: tuple[float, float, float],
    excluded: float,
    wanted: tuple[float | None, float | None],
) -> None:
    found = machine.during(texts.Ticks(*before), texts.Ticks(*after), 10.0, excluded)
    assert found == pytest.approx(wanted)
    assert machine.during(None, texts.Ticks(*after), 10.0, excluded) == (None, None)
    assert machine.during(texts.Ticks(*before), None, 10.0, excluded) == (None, None)


@pytest.mark.parametrize(
    ("why", "there"),
    [
        ("", True),
        ("unsupported(ENOENT)", False),
        ("not believed: counted nothing during a known loop", False),
        ("permission(EACCES): needs CAP_PERFMON", None),
        ("never counted: no counter register was free", None),
    ],
)
def test_a_pmu_is_there_or_not_or_may_not_be_asked(why: str, there: bool | None) -> None:
    assert texts.pmu(why) is there


def test_switches_of_the_cpu() -> None:
    assert [texts.turbo("", "0\n"), texts.turbo("1\n", ""), texts.turbo("1", "1")] == [True, True, False]
    assert texts.turbo("", "") is None
    assert [texts.switch("1\n"), texts.switch("0"), texts.switch("on"), texts.switch("")] == [
        *(True, False, None, None)
    ]
    assert texts.governor(["powersave\n", "powersave\n", "performance\n"]) == "performance, powersave"
    assert texts.governor(["", ""]) is None


def test_a_gpu_and_its_driver_are_known_without_asking_nvml() -> None:
    assert texts.gpu_driver(DRIVER) == "535.261.03"
    assert texts.gpu_driver(OPEN_DRIVER) == "550.54.14"
    assert texts.gpu_driver("GCC version: 12.2.0 \n") is None
    assert texts.gpu_model("Model: \t\t NVIDIA GH200 480GB\nIRQ: 12\n") == "NVIDIA GH200 480GB"
    assert texts.gpu_model("IRQ: 12\n") is None


@given(st.text())
def test_no_text_makes_anything_raise(text: str) -> None:
    for prefix in (
        "",
        "flags: aperfmperf\ncpu MHz : ",
        "CPU implementer : ",
        "cpu  ",
        "MemTotal: ",
        "Model: ",
    ):
        hostile = prefix + text
        texts.cpu_model(hostile), texts.ticks(hostile), texts.memory_bytes(hostile)
        texts.frequency_mhz(hostile, [hostile]), texts.temperature_c([(hostile, hostile)])
        texts.virtualised(hostile, maker=hostile, product=hostile, hypervisor=hostile, clocks=hostile)
        texts.governor([hostile]), texts.turbo(hostile, hostile), texts.switch(hostile)
        texts.gpu_driver(hostile), texts.gpu_model(hostile), texts.pmu(hostile)


# ---- a whole machine


@pytest.fixture
def gpu_node(tmp_path: Path) -> Path:
    """The files of a machine with two GPUs, as far as they are read."""
    files = {
        "proc/cpuinfo": GH200,
        "proc/meminfo": "MemTotal:       500000 kB\nMemFree: 1 kB\n",
        "proc/stat": STAT.format(500, 1000, 30),
        "proc/driver/nvidia/version": OPEN_DRIVER,
        "proc/driver/nvidia/gpus/0009:01:00.0/information": "Model: NVIDIA GH200 480GB\n",
        "proc/driver/nvidia/gpus/000a:01:00.0/information": "\xff",
        "sys/class/dmi/id/sys_vendor": "NVIDIA\n",
        "sys/class/thermal/thermal_zone0/type": "acpitz\n",
        "sys/class/thermal/thermal_zone0/temp": "40000\n",
        "sys/class/hwmon/hwmon3/name": "cpu_thermal\n",
        "sys/class/hwmon/hwmon3/temp2_input": "39500\n",
        "sys/devices/system/cpu/online": "0-1,3\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "3400000\n",
        "sys/devices/system/cpu/cpu10/cpufreq/scaling_cur_freq": "3200000\n",
        "sys/devices/system/cpu/cpufreq/boost": "1\n",
        "sys/devices/system/cpu/smt/active": "0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="latin-1")
    return tmp_path


def test_a_machine_is_described_from_its_files(gpu_node: Path) -> None:
    found = machine.describe({"py-spy": "0.4.3"}, gpu_node)
    assert (found.cpu, found.cpus, found.memory_bytes) == ("Arm Neoverse V2", 3, 512_000_000)
    assert (found.virtualised, found.governor, found.turbo, found.smt) == ("", "performance", True, False)
    assert found.gpus == ("NVIDIA GH200 480GB", "unknown")
    assert (found.driver, found.tools) == ("550.54.14", {"py-spy": "0.4.3"})


def test_a_machine_that_shows_nothing_is_described_too(tmp_path: Path) -> None:
    (tmp_path / "proc/cpuinfo").mkdir(parents=True)  # cannot be read
    found = machine.describe({}, tmp_path)
    assert [found.virtualised, found.governor, found.turbo, found.smt, found.driver] == [None] * 5
    assert found.gpus == ()
    assert found.memory_bytes > 1 << 20
    state = machine.Watch(tmp_path).state(0.0)
    assert [state.frequency_mhz, state.temperature_c, state.gpu_temperature_c] == [None] * 3
    assert (state.steal_share, state.other_cores) == (None, None)


def test_this_machine_is_described_and_the_record_can_be_read_again() -> None:
    found = machine.describe({})
    assert found.cpus == os.sysconf("SC_NPROCESSORS_ONLN")
    assert found.host == os.uname().nodename
    assert parse(as_line(found)) == found


# ---- a run's state


def test_a_watch_tells_the_state_at_the_begin_and_the_difference_at_the_end(
    gpu_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpu_temperature_c", lambda: 66.0)
    clock = iter((100.0, 100.0, 110.0))
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(clock))
    watch = machine.Watch(gpu_node)
    rate = os.sysconf("SC_CLK_TCK")
    (gpu_node / "proc/stat").write_text(STAT.format(500 + 12 * rate, 1000 + 6 * rate, 30 + 2 * rate))
    (gpu_node / "sys/class/hwmon/hwmon3/temp2_input").write_text("90000\n")
    watch.end()
    (gpu_node / "proc/stat").write_text(STAT.format(10**6, 10**6, 10**6))  # after the run
    state = watch.state(9.0)
    assert (state.frequency_mhz, state.temperature_c, state.gpu_temperature_c) == (3300.0, 39.5, 66.0)
    assert state.steal_share == pytest.approx(0.1)
    assert state.other_cores == pytest.approx(0.3)


def test_a_watch_on_this_machine_sees_this_process_unless_it_is_excluded() -> None:
    watch = machine.Watch()
    began = time.process_time()
    while (spent := time.process_time() - began) < 0.5:
        pass
    alone = watch.state(0.0).other_cores
    without = watch.state(spent).other_cores
    assert alone is not None
    assert without is not None
    assert alone > without


# ---- GPUs


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[StandIn]:
    made = StandIn(tmp_path / "nvml", devices=3)
    yield made
    made.release()


def hottest(gpus: StandIn) -> float | None:
    return machine.gpu_temperature_c({"LD_LIBRARY_PATH": str(gpus.folder)})


def test_the_hottest_gpu_counts_and_one_that_is_lost_does_not(gpus: StandIn) -> None:
    gpus.set(0, temperature_c=90)
    gpus.fail("nvmlDeviceGetTemperature", 15, device=0)
    gpus.set(1, temperature_c=71)
    gpus.set(2, temperature_c=50)
    assert hottest(gpus) == 71.0


def test_a_driver_that_does_not_begin_gives_no_temperature(gpus: StandIn) -> None:
    gpus.fail("nvmlInit", 999)
    assert hottest(gpus) is None


def test_a_driver_that_hangs_is_not_waited_for(gpus: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_GPU_DEADLINE_S", 0.5)
    gpus.hang("nvmlDeviceGetCount")
    assert hottest(gpus) is None


def test_nvml_is_not_asked_where_no_driver_is_loaded(gpu_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(machine, "gpu_temperature_c", lambda: asked.append(1))
    machine.Watch(gpu_node)
    assert asked == [1]
    (gpu_node / "proc/driver/nvidia/version").unlink()
    machine.Watch(gpu_node)
    assert asked == [1]
