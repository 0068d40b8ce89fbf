"""The Job that runs the kit on the node: made, followed, and what it leaves."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import tarfile
import time
from pathlib import Path, PurePosixPath

import yaml

from bench.k8s.kubectl import BenchError, Kubectl, KubectlError, Object, Say, clean

NAME = "expanse-ebpf-bench"
RUN = "expanse-ebpf-bench/run"  # a label
ON_NODE = "/var/lib/expanse-ebpf-bench"
POLL_S, TELL_S = 1.0, 10.0
_UNREACHABLE_S = 600.0  # a run goes on without its API server; for so long this waits for it
_BEGIN, _END = "-----BEGIN EXPANSE-EBPF RESULTS-----", "-----END EXPANSE-EBPF RESULTS-----"
_MOST_BYTES = 256 << 20
# Of a container that waits: it will not start however long one waits.
_HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")


def config_map(plan: str, run: str, namespace: str) -> Object:
    """The plan. There can be only one of that name: that keeps runs apart, wherever they are started."""
    metadata = {"name": NAME, "namespace": namespace, "labels": {RUN: run}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"plan.toml": plan}}


def manifest(
    template: str, run: str, namespace: str, node: str, image: str, limit_s: int, runtime_class: str
) -> Object:
    """The Job out of job.yaml's text."""
    job: Object = yaml.safe_load(template)
    job["metadata"]["namespace"] = namespace
    job["spec"]["activeDeadlineSeconds"] = limit_s
    pod = job["spec"]["template"]
    for labels in (job["metadata"]["labels"], pod["metadata"]["labels"]):
        labels[RUN] = run
    pod["spec"]["nodeName"] = node
    if runtime_class:
        pod["spec"]["runtimeClassName"] = runtime_class
    (container,) = pod["spec"]["containers"]
    container["image"] = image
    for variable in container["env"]:
        if variable["name"] == "RESULTS":
            variable["value"] = f"/results/{run}"
    return job


def follow(kubectl: Kubectl, namespace: str, run: str, start_s: float, say: Say) -> bool:
    """Wait for the Job's end and say how it gets on: whether it succeeded. Raises BenchError."""
    begun = answered = time.monotonic()
    told, told_at = "", 0.0
    while True:
        try:
            job = kubectl.get("job", namespace, NAME)
            pods = kubectl.list("pod", namespace, labels=f"{RUN}={run}")
            answered = time.monotonic()
        except KubectlError:
            if time.monotonic() > answered + _UNREACHABLE_S:
                raise
            time.sleep(POLL_S)
            continue
        if job is None:
            raise BenchError(f"somebody has deleted the job {namespace}/{NAME}")
        for condition in job.get("status", {}).get("conditions", ()):
            if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
                why = condition.get("reason", "")
                if why:
                    say(f"the job has ended: {clean(why)}")
                return bool(condition["type"] == "Complete")
        if not any(pod.get("status", {}).get("phase") not in (None, "Pending") for pod in pods):
            _refuse_to_wait(pods, time.monotonic() - begun, start_s)
        elif time.monotonic() > told_at + TELL_S:
            told_at = time.monotonic()
            line = log(kubectl, namespace, run, last=1).strip()
            progress = " " in line and not line.startswith("-----")  # not the archive
            if progress and line != told:
                say(clean(line[:300]))
                told = line
        time.sleep(POLL_S)


def _refuse_to_wait(pods: list[Object], waited_s: float, start_s: float) -> None:
    reasons = [
        f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip()
        for pod in pods
        for status in pod.get("status", {}).get("containerStatuses", ())
        if (waiting := status.get("state", {}).get("waiting"))
    ]
    if waited_s > start_s or any(reason.startswith(_HOPELESS) for reason in reasons):
        why = "; ".join(reasons) or ("the node has not taken it" if pods else "it has no pod")
        raise BenchError(f"the job did not start within {waited_s:.0f} s: {clean(why)}")


def log(kubectl: Kubectl, namespace: str, run: str, last: int = -1) -> str:
    """The last lines of what the job has printed, -1 for all of them; "" when that cannot be had now."""
    try:
        (pod,) = kubectl.list("pod", namespace, labels=f"{RUN}={run}")
        return kubectl.call("logs", "-n", namespace, pod["metadata"]["name"], "-c", "bench", f"--tail={last}")
    except (KubectlError, ValueError):
        return ""


def fetch(kubectl: Kubectl, namespace: str, run: str, into: Path) -> list[str]:
    """Have the results in a folder: the names of its files. Raises BenchError."""
    for _ in range(5):  # the kubelet has a container's last lines a moment after its end
        text = log(kubectl, namespace, run)
        if _END in text:
            break
        time.sleep(POLL_S)
    try:
        files = unpacked(text)
    except ValueError as error:
        raise BenchError(f"no results in the job's log ({error}); on the node: {ON_NODE}/{run}") from None
    try:
        for name, content in files.items():
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise BenchError(f"{into}: {error}; the results are on the node, {ON_NODE}/{run}") from None
    return sorted(files)


def unpacked(text: str) -> dict[str, bytes]:
    """The files in the archive that a log ends with, by name; raises ValueError."""
    found = re.findall(
        rf"^{_BEGIN}\r?\n([A-Za-z0-9+/=\s]*)^{_END} ([0-9a-f]{{64}})\r?$", text, flags=re.MULTILINE
    )
    if not found:
        raise ValueError("it has no archive that is whole" if _BEGIN in text else "it has no archive")
    try:
        archive = base64.b64decode(found[-1][0])
    except binascii.Error as error:
        raise ValueError(f"the archive is damaged: {error}") from None
    if hashlib.sha256(archive).hexdigest() != found[-1][1]:
        raise ValueError("the archive is damaged: its sum differs")
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for member in tar:
                name = PurePosixPath(member.name)
                if not member.isfile():
                    continue
                if name.is_absolute() or ".." in name.parts:
                    raise ValueError(f"the archive has a file of the name {clean(member.name)}")
                if member.size > _MOST_BYTES - sum(map(len, files.values())):
                    raise ValueError("the archive is too large")
                file = tar.extractfile(member)
                assert file
                files[str(name)] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"the archive is damaged: {error}") from None
    if "runs.jsonl" not in files:
        raise ValueError("the archive has no runs.jsonl")
    return files
