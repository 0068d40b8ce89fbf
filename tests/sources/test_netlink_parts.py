"""Parts of pyroute2, each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

PART = "from expanse_ebpf.sources.netlink_parts import part; taskstats = part('netlink.taskstats')\n"


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", PART + code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_only_the_part_is_loaded() -> None:
    loaded = run("import sys; print(*[name for name in sys.modules if name.startswith('pyroute2')])").split()
    assert "pyroute2.netlink.taskstats" in loaded
    assert not {"pyroute2.ndb.main", "pyroute2.ipset", "pyroute2.iproute.linux"} & set(loaded)


@pytest.mark.parametrize(
    "code",
    [
        "import pyroute2; print(pyroute2.IPRoute.__name__)",
        "from pyroute2 import IPRoute; print(IPRoute.__name__)",
        "from pyroute2 import TaskStats; assert TaskStats is taskstats.TaskStats; print('IPRoute')",
        "from pyroute2 import netlink; print('IPRoute')",
    ],
)
def test_the_whole_package_is_still_to_be_had(code: str) -> None:
    assert run(code) == "IPRoute"


def test_a_part_that_does_not_exist() -> None:
    assert run("try: part('netlink.nothing')\nexcept ImportError: print('none')") == "none"
