"""Real containers, made by runc: whose they are, whatever the engine above them is called."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_agent import Start, job, start  # noqa: F401 (a fixture)

BUSYBOX = Path("/bin/busybox")  # Debian's busybox-static: a root file system in one file


class Engine:
    """Starts containers in given cgroups, and removes both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "runc"
        self.names: list[str] = []
        (folder / "rootfs/bin").mkdir(parents=True)
        shutil.copy(BUSYBOX, folder / "rootfs/bin/busybox")
        self.cgroups: list[str] = []

    def start(self, cgroup: str) -> None:
        bundle = self.folder / f"bundle-{len(self.names)}"
        bundle.mkdir()
        subprocess.run(["runc", "spec", "--bundle", str(bundle)], check=True)
        spec = json.loads((bundle / "config.json").read_text())
        spec["process"]["terminal"] = False
        spec["process"]["args"] = ["/bin/busybox", "sh", "-c", "while :; do :; done"]
        spec["process"]["user"] = {"uid": 65534, "gid": 65534}
        spec["root"]["path"] = str(self.folder / "rootfs")
        spec["linux"]["cgroupsPath"] = cgroup
        (bundle / "config.json").write_text(json.dumps(spec))
        name = f"test-expanse-{uuid.uuid4().hex[:8]}"
        self.names.append(name)
        self.cgroups.append(cgroup)
        command = ["runc", "--root", str(self.root), "run", "--detach", "--bundle", str(bundle), name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=30)

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["runc", "--root", str(self.root), "delete", "--force", name], check=False)
        for cgroup in self.cgroups:
            levels = cgroup.strip("/").split("/")
            for mount in Path("/sys/fs/cgroup").iterdir():
                for depth in range(len(levels), 0, -1):  # runc leaves the levels above its own
                    with contextlib.suppress(OSError):  # not there, or somebody else's as well
                        mount.joinpath(*levels[:depth]).rmdir()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


def test_a_plain_container_and_a_pod(engine: Engine, start: Start) -> None:  # noqa: F811
    node = start()
    container, inner = uuid.uuid4().hex * 2, uuid.uuid4().hex * 2
    pod = str(uuid.uuid4())
    engine.start(f"/docker/{container}")
    engine.start(f"/kubepods/burstable/pod{pod}/{inner}")
    keys = (f"container/{container}", f"kubernetes/{pod}")
    snapshot = node.wait_for(lambda s: all((job(s, key) or {}).get("cpu_cores") for key in keys))
    plain, in_pod = (job(snapshot, key) for key in keys)
    assert plain is not None
    assert in_pod is not None
    for seen, inside in ((plain, container), (in_pod, inner)):
        assert seen["containers"] == [inside]
        assert (seen["uid"], seen["processes"]) == (65534, 1)
        assert seen["memory_bytes"] is not None
    engine.close()
    node.wait_for(lambda s: not any(job(s, key) for key in keys))
    assert node.stop() == 0
