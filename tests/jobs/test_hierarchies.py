from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs.hierarchies import (
    Hierarchy,
    Tally,
    choose,
    mode,
    mounted,
    parse_mountinfo,
    parse_proc_cgroup,
)

HYBRID = """\
23 1 0:21 / / rw,relatime - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:10 master:1 - cgroup cgroup rw,seclabel,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""
V2 = "25 20 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"


def named(*names: str) -> list[Hierarchy]:
    return [
        Hierarchy("unified", 2, (), "/u", "/")
        if name == "unified"
        else Hierarchy(name, 1, () if name.startswith("name=") else (name,), f"/{name}", "/")
        for name in names
    ]


def test_hybrid_mountinfo():
    assert parse_mountinfo(HYBRID) == [
        Hierarchy("cpu", 1, ("cpu", "cpuacct"), "/sys/fs/cgroup/cpu,cpuacct", "/"),
        Hierarchy("memory", 1, ("memory",), "/sys/fs/cgroup/memory", "/"),
        Hierarchy("name=systemd", 1, (), "/sys/fs/cgroup/systemd", "/"),
        Hierarchy("unified", 2, (), "/sys/fs/cgroup/unified", "/"),
    ]


@pytest.mark.parametrize(
    ("text", "mount", "root"),
    [
        (V2, "/sys/fs/cgroup", "/"),
        # octal escapes: blank, backslash
        (r"25 20 0:22 / /a\040b\134c rw - cgroup2 none rw", "/a b\\c", "/"),
        # what one container sees without a cgroup namespace
        ("25 20 0:22 /docker/aa /sys/fs/cgroup ro - cgroup2 cgroup ro", "/sys/fs/cgroup", "/docker/aa"),
        # a bind mount of a part does not hide the whole, in either order
        (V2 + "9 8 0:22 /kubepods /mnt rw - cgroup2 cgroup2 rw", "/sys/fs/cgroup", "/"),
        ("9 8 0:22 /kubepods /mnt rw - cgroup2 cgroup2 rw\n" + V2, "/sys/fs/cgroup", "/"),
        # the first of two equal ones
        (V2 + "9 8 0:22 / /second rw - cgroup2 cgroup2 rw", "/sys/fs/cgroup", "/"),
        # mounted over at one place, still there at another
        (
            V2 + "9 8 0:22 / /second rw - cgroup2 cgroup2 rw\n9 25 0:9 / /sys/fs/cgroup rw - tmpfs t rw",
            "/second",
            "/",
        ),
    ],
)
def test_which_mount_counts(text, mount, root):
    (hierarchy,) = parse_mountinfo(text)
    assert (hierarchy.mount, hierarchy.root) == (mount, root)


@given(st.text() | st.text(alphabet="0: /-\\cgroup2,rw\n"))
def test_hostile_mountinfo_never_raises(text):
    for hierarchy in parse_mountinfo(f"1 2 3 {text} - cgroup2 a b\n{text}"):
        assert hierarchy.name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/\n", {"unified": "/"}),
        ("4:cpu,cpuacct:/a:b\n", {"cpu": "/a:b", "cpuacct": "/a:b"}),
        ("1:name=systemd:/init.scope\n0::/x\n", {"name=systemd": "/init.scope", "unified": "/x"}),
        ("0::/job (deleted)\n", {"unified": "/job"}),  # v2 marks a removed cgroup
        ("5:freezer:/job (deleted)\n", {"freezer": "/job (deleted)"}),  # v1 does not: it is the name
        ("0::/a (deleted)/b\n", {"unified": "/a (deleted)/b"}),
        ("", {}),
        ("nonsense\n7:memory\n8:pids:relative\n", {}),
    ],
)
def test_proc_cgroup(text, expected):
    assert parse_proc_cgroup(text) == expected


@given(st.text())
def test_hostile_proc_cgroup_never_raises(text):
    assert all(path.startswith("/") for path in parse_proc_cgroup(text).values())


def test_directory_and_path():
    whole = Hierarchy("unified", 2, (), "/sys/fs/cgroup", "/")
    assert whole.directory("/a/b") == "/sys/fs/cgroup/a/b"
    assert whole.directory("/") == "/sys/fs/cgroup"
    assert whole.directory("/../b") is None
    assert whole.path("/sys/fs/cgroup/a/b") == "/a/b"
    assert whole.path("/sys/fs/cgroup") == "/"
    assert whole.path("/sys/fs/cgroups/a") is None
    part = Hierarchy("memory", 1, ("memory",), "/m", "/docker/aa")
    assert part.directory("/docker/aa/job") == "/m/job"
    assert part.directory("/docker/aa") == "/m"
    assert part.directory("/docker/aab") is None
    assert part.path("/m/job") == "/docker/aa/job"


def test_mounted_reads_the_controllers_of_the_unified_hierarchy(tmp_path: Path):
    cgroup = tmp_path / "cg"
    cgroup.mkdir()
    (cgroup / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(V2.replace("/sys/fs/cgroup", str(cgroup)))
    (hierarchy,) = mounted(str(tmp_path))
    assert hierarchy.controllers == ("cpuset", "cpu", "io", "memory", "pids")


def test_mounted_here():
    here = mounted()
    assert all(Path(h.mount).is_dir() for h in here)
    assert len({h.name for h in here}) == len(here)
    assert choose({}, here) in {h.name for h in here}


def test_nothing_mounted_is_said_with_the_remedy(tmp_path: Path):
    with pytest.raises(UnavailableError, match="mount /proc"):
        mounted(str(tmp_path))
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("23 1 0:21 / / rw,relatime - ext4 /dev/vda rw\n")
    for call in (lambda: mounted(str(tmp_path)), lambda: mode([]), lambda: choose({}, [])):
        with pytest.raises(UnavailableError, match="mount -t cgroup2"):
            call()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("unified",), "v2"),
        (("unified", "name=systemd"), "v2"),
        (("memory", "name=systemd"), "v1"),
        (("memory", "unified"), "hybrid"),
    ],
)
def test_mode(names, expected):
    assert mode(named(*names)) == expected


@pytest.mark.parametrize(
    ("jobs", "names", "expected"),
    [
        ({"freezer": (3, 0), "unified": (0, 0)}, ("memory", "unified", "freezer"), "freezer"),
        (
            {"freezer": (3, 0), "unified": (3, 0), "memory": (3, 0)},
            ("memory", "freezer", "unified"),
            "unified",
        ),
        (
            {"freezer": (2, 0), "cpuset": (2, 0), "memory": (2, 0)},
            ("memory", "cpuset", "freezer", "unified"),
            "freezer",
        ),
        ({"cpuset": (2, 0), "memory": (2, 0)}, ("memory", "cpuset", "unified"), "cpuset"),
        ({"pids": (1, 0), "devices": (1, 0)}, ("pids", "devices", "unified"), "devices"),
        ({"perf_event": (1, 0), "blkio": (1, 0)}, ("perf_event", "blkio"), "blkio"),
        ({}, ("memory", "unified"), "unified"),
        ({}, ("memory", "cpuacct"), "memory"),
        # BPF cannot follow a task into a hierarchy without a controller
        ({"name=systemd": (9, 0), "memory": (1, 0)}, ("name=systemd", "memory", "unified"), "memory"),
        # systemd's units lie in memory and pids, a job of SLURM's proctrack/cgroup in freezer alone
        ({"freezer": (1, 0), "memory": (0, 9), "pids": (0, 9)}, ("memory", "pids", "freezer"), "freezer"),
        ({"freezer": (2, 0), "memory": (2, 9)}, ("memory", "freezer"), "memory"),
        # a hierarchy that is not mounted cannot be taken
        ({"cpuset": (9, 0)}, ("memory", "unified"), "unified"),
    ],
)
def test_choose(jobs, names, expected):
    assert choose({name: Tally(*count) for name, count in jobs.items()}, named(*names)) == expected
