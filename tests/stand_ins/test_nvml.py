"""The stand-in for libnvidia-ml.so.1 has NVIDIA's symbols, pynvml's layouts, and NVML's manners."""

from __future__ import annotations

import ctypes
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
from elftools.elf.elffile import ELFFile

from tests.conftest import ROOT
from tests.stand_ins.build import VARIANTS, build
from tests.stand_ins.caller import Call
from tests.stand_ins.nvml import StandIn

# What the driver line of Debian's package, 535, did not have yet.
NEWER_THAN_535 = {"nvmlDeviceGetTemperatureV"}


def exported(library: Path) -> set[str]:
    with library.open("rb") as file:
        table: Any = ELFFile(file).get_section_by_name(".dynsym")
        own = [s for s in table.iter_symbols() if s["st_shndx"] != "SHN_UNDEF"]
        return {symbol.name for symbol in own if symbol["st_info"]["type"] == "STT_FUNC"}


# ---- against NVIDIA's library and pynvml


def test_every_function_is_one_of_nvidias(real: Path) -> None:
    ours = exported(build("v3"))
    assert len(ours) > 70
    assert {name for name in ours if not name.startswith("nvml")} == set()
    assert ours - exported(real) == NEWER_THAN_535


def test_the_soname_is_nvidias(real: Path) -> None:
    def soname(library: Path) -> str:
        with library.open("rb") as file:
            section: Any = ELFFile(file).get_section_by_name(".dynamic")
            return str(next(section.iter_tags("DT_SONAME")).soname)

    assert soname(build("v3")) == soname(real) == "libnvidia-ml.so.1"


# Calls a function before and after nvmlInit, which finds no driver, with null pointers and with real ones.
_WITHOUT_DRIVER = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.nvmlErrorString.restype = ctypes.c_char_p
def ask(name):
    function = getattr(library, name)
    return [function(*[None] * 6), function(*[ctypes.create_string_buffer(32768) for _ in range(6)])]

answers = {"words": [library.nvmlErrorString(code).decode() for code in [*range(32), 999]]}
for name in sys.argv[2:]:
    answers[name] = ask(name)
answers["init"] = [library.nvmlInit_v2(), library.nvmlInitWithFlags(0), library.nvmlShutdown()]
for name in sys.argv[2:]:
    answers[name] += ask(name)
print(json.dumps(answers))
"""


def test_without_a_driver_it_says_what_nvidias_says(gpus: StandIn, real: Path) -> None:
    gpus.system(devices=None)
    names = sorted(exported(gpus.library) - NEWER_THAN_535 - {"nvmlErrorString"})

    def answers(library: Path) -> dict[str, Any]:
        command = [sys.executable, "-c", _WITHOUT_DRIVER, str(library), *names]
        said: dict[str, Any] = json.loads(subprocess.check_output(command))
        return said

    expected = answers(real)
    assert expected["init"] == [9, 9, 0]
    assert answers(gpus.library) == expected


def test_structures_have_the_sizes_of_pynvml() -> None:
    source = (Path(__file__).parent / "nvml_abi.h").read_text()
    asserted = re.findall(r'static_assert\(sizeof\(\w+\) == (\d+), "(\w+)"\)', source)
    sizes = {name: int(size) for size, name in asserted}
    assert sizes.pop("nvmlProcessInfo_v1_t") == 16  # which pynvml has no more
    # All but that one and nvmlReturn_t, which is no structure.
    assert sizes == {name: ctypes.sizeof(getattr(pynvml, name)) for name in sizes}
    assert len(sizes) == len(re.findall(r"^} nvml\w+_t;", source, re.MULTILINE)) - 2


def test_every_function_that_the_agent_calls_is_there() -> None:
    """By pynvml's own account of which symbol each of its functions calls."""

    def symbols(function: str) -> set[str]:
        source = inspect.getsource(getattr(pynvml, function))
        found = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
        return found.union(*(symbols(name) for name in re.findall(r"return (nvml\w+)\(", source)))

    sources = [path.read_text() for path in (ROOT / "expanse_ebpf").rglob("*.py")]
    functions = {name for source in sources for name in re.findall(r"pynvml\.(nvml[A-Z]\w+)", source)}
    functions = {name for name in functions if callable(getattr(pynvml, name))}
    assert "nvmlDeviceGetFieldValues" in functions
    assert set().union(*map(symbols, functions)) - exported(build("v3")) == set()


def test_variants_leave_symbols_out() -> None:
    everything = exported(build("v3"))

    def without(variant: str) -> set[str]:
        assert exported(build(variant)) <= everything
        return everything - exported(build(variant))

    lists = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]
    newest = {f"{name}_v3" for name in lists}
    suffixed = newest | {f"{name}_v2" for name in lists}
    gpm = {name for name in everything if name.startswith("nvmlGpm")}
    assert len(gpm) == 6
    assert without("v2") == newest
    assert without("unsuffixed") == suffixed
    assert without("none") == suffixed | set(lists)
    assert without("no_gpm") == gpm
    old = suffixed | gpm | {"nvmlDeviceGetMigMode", "nvmlDeviceGetMemoryInfo_v2", "nvmlEventSetWait_v2"}
    assert without("old") > old
    assert without("v3_long") == without("v3_short") == set()
    assert {"v3", "v2", "v3_long", "v3_short", "unsuffixed", "none", "no_gpm", "old"} == set(VARIANTS)


def test_every_function_is_counted_by_its_own_name(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus, begin=False)
    names = exported(gpus.library) - {"nvmlErrorString"}
    nvml(f"[getattr(library, name)(*[None] * 6) for name in {sorted(names)}] and None")
    assert gpus.calls() == dict.fromkeys(names, 1)
