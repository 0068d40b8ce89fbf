"""A cluster of one node for tests: a real API, and a stand-in for whatever acts on it.

There is no controller-manager, no kubelet and no container. `Cluster` does by the API what those would do:
makes and ends the pods of DaemonSets and Jobs, collects what has no owner any more, and answers the API
server's calls for logs as a kubelet does. The command of a Job's container is run for real, on this machine,
with its mounts found in a folder and a stand-in for `expanse-ebpf` first on its PATH.
"""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.bench.control_plane import Api

NODE = "n1"
TURN_S = 0.1
# Prints, writes results, waits while its node's folder has a file "hold", ends with the code in "code".
KIT = """#!/bin/sh
[ "$1 $2 $4" = "bench run -o" ] || exit 64
trap 'echo "ended early"; exit 130' TERM
mkdir -p "$5"
cp "$3" "$5/plan.toml"
echo "kit: begun"
echo '{"kind": "stand-in"}' >"$5/runs.jsonl"
while [ -e "$NODE_FOLDER/hold" ]; do sleep 0.05; done
exit "$(cat "$NODE_FOLDER/code")"
"""
Object = dict[str, Any]
MERGE = "application/merge-patch+json"


class Cluster:
    """The node and the controllers, as a thread, while it is entered."""

    def __init__(self, api: Api, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.beside: list[str] = []  # pods that were on the node when the last Job's container began
        self.image_is_missing = False
        self.collectors_stay = False  # their pods do not end
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._act)
        self._logs = ThreadingHTTPServer(("127.0.0.1", 0), self._kubelet())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(api.folder / "apiserver.crt", api.folder / "apiserver.key")
        self._logs.socket = context.wrap_socket(self._logs.socket, server_side=True)
        self._listener = threading.Thread(target=self._logs.serve_forever)
        (folder / "bin").mkdir()
        (folder / "bin/expanse-ebpf").write_text(KIT)
        (folder / "bin/expanse-ebpf").chmod(0o755)
        (folder / "code").write_text("0")

    def __enter__(self) -> Cluster:
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._logs.server_address[1]}},
        }
        self.api.call("POST", "/api/v1/nodes", {"metadata": {"name": NODE}, "status": status})
        self._listener.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._logs.shutdown()
        self._listener.join()
        self._logs.server_close()

    def items(self, path: str) -> list[Object]:
        """The objects of a collection of the API."""
        found: list[Object] = self.api.call("GET", path)["items"]
        return found

    def pods(self) -> list[str]:
        """The names of the pods."""
        return [pod["metadata"]["name"] for pod in self.items("/api/v1/pods")]

    def logs(self) -> list[str]:
        """What the containers have printed."""
        return [path.read_text() for path in self.folder.glob("*.log")]

    @property
    def holding(self) -> Path:
        """While this file is there, the kit's stand-in goes on."""
        return self.folder / "hold"

    # ---- the controllers

    def _act(self) -> None:
        while not self._stop.wait(TURN_S):
            # What was listed may have been deleted since: the next turn sees it.
            with contextlib.suppress(LookupError):
                self._turn()

    def _turn(self) -> None:
        owners = {"DaemonSet": "/apis/apps/v1/daemonsets", "Job": "/apis/batch/v1/jobs"}
        found = {kind: self.items(path) for kind, path in owners.items()}
        alive = {thing["metadata"]["uid"] for things in found.values() for thing in things}
        pods = self.items("/api/v1/pods")
        owned = set()
        for pod in pods:
            owner = pod["metadata"]["ownerReferences"][0]
            owned.add(owner["uid"])
            if owner["uid"] not in alive or "deletionTimestamp" in pod["metadata"]:
                self._end(pod, owner["kind"])
        for thing in found["DaemonSet"]:
            if thing["metadata"]["uid"] not in owned:
                self._status(self._pod("DaemonSet", thing), {"phase": "Running"})
        for job in found["Job"]:
            if job["metadata"]["uid"] not in owned and not job["status"].get("conditions"):
                self._start(self._pod("Job", job))
            self._see(job)

    def _pod(self, kind: str, owner: Object) -> Object:
        metadata, template = owner["metadata"], owner["spec"]["template"]
        reference = {
            "apiVersion": "batch/v1" if kind == "Job" else "apps/v1",
            "kind": kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        pod = {
            "metadata": {
                "name": f"{metadata['name']}-{metadata['uid'][:5]}",
                "labels": template["metadata"]["labels"],
                "ownerReferences": [reference],
            },
            "spec": {**template["spec"], "nodeName": NODE},
        }
        made: Object = self.api.call("POST", f"/api/v1/namespaces/{metadata['namespace']}/pods", pod)
        return made

    def _end(self, pod: Object, kind: str) -> None:
        if kind == "DaemonSet" and self.collectors_stay:
            return
        process = self._processes.get(pod["metadata"]["name"])
        if process and process.poll() is None:
            process.terminate()
            return
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self.api.call("DELETE", path, {"gracePeriodSeconds": 0})

    def _status(self, pod: Object, status: Object) -> None:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self.api.call("PATCH", f"{path}/status", {"status": status}, MERGE)

    # ---- the kubelet

    def _start(self, pod: Object) -> None:
        name, (container,) = pod["metadata"]["name"], pod["spec"]["containers"]
        if self.image_is_missing:
            waiting = {"waiting": {"reason": "ErrImageNeverPull", "message": "no such image"}}
            state = {"name": container["name"], "image": "", "imageID": "", "restartCount": 0, "ready": False}
            self._status(pod, {"phase": "Pending", "containerStatuses": [{**state, "state": waiting}]})
            return
        self.beside = [other for other in self.pods() if other != name]
        mounts = {each["mountPath"]: self.folder / each["name"] for each in container["volumeMounts"]}
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/configmaps"
                data = self.api.call("GET", f"{path}/{volume['configMap']['name']}")["data"]
                (self.folder / volume["name"]).mkdir(exist_ok=True)
                for file, text in data.items():
                    (self.folder / volume["name"] / file).write_text(text)
        environment = os.environ | {"NODE_FOLDER": str(self.folder)}
        environment["PATH"] = f"{self.folder}/bin:{environment['PATH']}"
        for variable in container["env"]:
            value = variable["value"]
            for mount, folder in mounts.items():
                if value.startswith(f"{mount}/"):
                    value = str(folder) + value.removeprefix(mount)
            environment[variable["name"]] = value
        with open(self.folder / f"{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                container["command"], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._status(pod, {"phase": "Running"})

    def _see(self, job: Object) -> None:
        """Tell the API that a Job's container has ended."""
        metadata = job["metadata"]
        name = f"{metadata['name']}-{metadata['uid'][:5]}"
        process = self._processes.get(name)
        if process is None or process.poll() is None or job["status"].get("conditions"):
            return
        failed = process.returncode != 0
        pod = {"metadata": {"name": name, "namespace": metadata["namespace"]}}
        self._status(pod, {"phase": "Failed" if failed else "Succeeded"})
        condition = {"type": "Failed" if failed else "Complete", "status": "True"}
        condition |= {"reason": "BackoffLimitExceeded"} if failed else {}
        path = f"/apis/batch/v1/namespaces/{metadata['namespace']}/jobs/{metadata['name']}/status"
        self.api.call("PATCH", path, {"status": {"conditions": [condition]}}, MERGE)

    def _kubelet(self) -> type[BaseHTTPRequestHandler]:
        folder = self.folder

        class Kubelet(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                assert parts.path.startswith("/containerLogs/")
                lines = (folder / f"{parts.path.split('/')[3]}.log").read_bytes().splitlines(keepends=True)
                last = parse_qs(parts.query).get("tailLines")
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"".join(lines[-int(last[0]) :] if last else lines))

            def log_message(self, *_: object) -> None:
                pass

        return Kubelet


def until(what: str, happens: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + limit_s
    while not happens():
        assert time.monotonic() < deadline, f"it did not come to it that {what}"
        time.sleep(0.05)
