"""bench/k8s/run.py as a program, and the collectors of a cluster for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.k8s import collectors, job, saved
from tests.bench.cluster import NODE, Cluster, until

RUN = Path(__file__).resolve().parents[2] / "bench/k8s/run.py"
IMAGE = f"registry.invalid/expanse-ebpf@sha256:{'0' * 64}"
SETS = "/apis/apps/v1/namespaces/default/daemonsets"
PLAN = 'name = "of the tests"\n'
Object = dict[str, Any]


def daemon_set(name: str, labels: dict[str, str], annotations: dict[str, str]) -> Object:
    """A collector, with a password where none should be, and values that YAML could take for others."""
    container = {
        "name": "collector",
        "image": "registry.invalid/collector:1",
        "args": ["--interval", "1"],
        "env": [{"name": "SECRET", "value": "yes"}, {"name": "OCTAL", "value": "0755"}],
    }
    spec = {
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}},
    }
    metadata = {"name": name, "labels": labels, "annotations": annotations}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec}


OURS = daemon_set(
    "expanse-ebpf",
    {"app.kubernetes.io/part-of": "expanse-ebpf", "app.kubernetes.io/managed-by": "Helm"},
    {"meta.helm.sh/release-name": "watch", "meta.helm.sh/release-namespace": "default"},
)
THEIRS = daemon_set(
    "dcgm-exporter", {"app": "dcgm"}, {"kubectl.kubernetes.io/last-applied-configuration": '{"kind":"x"}\n'}
)
FURTHER = "--collector=DaemonSet/default/dcgm-exporter"


def installed(cluster: Cluster) -> list[Object]:
    """The collectors that are there by name, without what the server makes of each."""
    kind = {"apiVersion": "apps/v1", "kind": "DaemonSet"}
    return [collectors.cleaned({**kind, **one}) for one in cluster.items(SETS)]


def in_file(path: Path) -> list[Object]:
    """The collectors of a save by name."""
    return sorted(saved.read(path).objects, key=lambda one: one["metadata"]["name"])


class Runner:
    """Calls of run.py with a folder for saves of their own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.saves = cluster, folder, folder / "saves"
        (folder / "plan.toml").write_text(PLAN)
        self.kubectl = cluster.api.kubectl

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        places = [f"--kubectl={self.kubectl}", f"--saves={self.saves}", "--patience-s=20"]
        return subprocess.Popen(
            [sys.executable, str(RUN), *places, *arguments],
            env=os.environ | self.cluster.api.environment(),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # as at a terminal: Ctrl-C is for all of its group
        )

    def bench(self, *arguments: str) -> subprocess.Popen[str]:
        options = [f"--node={NODE}", f"--image={IMAGE}", "--yes-uninstall", "--plan=plan.toml", FURTHER]
        return self.start(*options, "--results=results", *arguments)

    def pending(self) -> list[Path]:
        return sorted(self.saves.glob("*.yaml"))

    def nothing_is_left(self) -> bool:
        items = self.cluster.items
        jobs, maps = items("/apis/batch/v1/jobs"), items(f"/api/v1/configmaps?labelSelector={job.RUN}")
        return not (jobs or maps or self.pending())


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and all that it has said."""
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def until_it_runs(cluster: Cluster) -> None:
    until("the kit runs", lambda: any("begun" in said for said in cluster.logs()))


def a_save(runner: Runner, objects: list[Object], cluster_uid: str = "") -> saved.Save:
    system = runner.cluster.api.call("GET", "/api/v1/namespaces/kube-system")
    uid = cluster_uid or system["metadata"]["uid"]
    path = saved.folder(runner.saves) / "one.yaml"
    save = saved.Save(path, "run-1", uid, NODE, "default", tuple(objects))
    save.write()
    return save
