"""A kubelet as far as its pod-resources API goes: a real gRPC server on a Unix socket."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from expanse_ebpf.wire.pod_resources_pb2 import (
    ContainerResources,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
    PodResources,
)

SERVICE = "v1.PodResourcesLister"


class Kubelet:
    """Serves `pods` on `socket`, which lies in a folder of its own; close() removes everything.

    `answer`, when it is set, makes the bytes of the answer instead. While `answering` is cleared, calls
    hang. `calls` counts the questions.
    """

    def __init__(self, service: str = SERVICE) -> None:
        # Not pytest's folder: a socket's path has at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="kubelet ")
        self.socket = Path(self._folder.name) / "kubelet.sock"
        self.answer: Callable[[], bytes] | None = None
        self.answering = threading.Event()
        self.answering.set()
        self.calls = 0
        self.pods: list[PodResources] = []
        self._service = service
        self._server: grpc.Server | None = None

    def give(
        self, namespace: str, pod: str, resource: str, *device_ids: str, container: str = "main"
    ) -> None:
        """A device plugin's devices to a container."""
        self.container(namespace, pod, container).devices.add(
            resource_name=resource, device_ids=device_ids, topology={"nodes": [{"ID": 0}]}
        )

    def claim(
        self,
        namespace: str,
        pod: str,
        *cdi: str,
        driver: str = "gpu.nvidia.com",
        pool: str = "node-a",
        device: str = "gpu-0",
        container: str = "main",
    ) -> None:
        """A dynamic resource's device to a container."""
        claimed = self.container(namespace, pod, container).dynamic_resources.add(
            claim_name="claim", claim_namespace=namespace
        )
        claimed.claim_resources.add(
            cdi_devices=[{"name": name} for name in cdi],
            driver_name=driver,
            pool_name=pool,
            device_name=device,
        )

    def container(self, namespace: str, pod: str, name: str) -> ContainerResources:
        """That container; it and its pod are made when they are not there."""
        entry = next((p for p in self.pods if (p.namespace, p.name) == (namespace, pod)), None)
        if entry is None:
            entry = PodResources(namespace=namespace, name=pod)
            self.pods.append(entry)
        for container in entry.containers:
            if container.name == name:
                return container
        return entry.containers.add(name=name, cpu_ids=[0, 1], memory=[{"memory_type": "memory", "size": 1}])

    def start(self) -> Kubelet:
        """Listen; the socket is a new one after each stop."""
        server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_send_message_length", -1)])
        handler = grpc.unary_unary_rpc_method_handler(self._list, ListPodResourcesRequest.FromString)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(self._service, {"List": handler}),)
        )
        server.add_insecure_port(f"unix:{self.socket}")
        server.start()
        self._server = server
        return self

    def stop(self) -> None:
        """Cut all connections and remove the socket."""
        if self._server is not None:
            self.answering.set()
            self._server.stop(0).wait()
            self._server = None
        self.socket.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop and remove the folder."""
        self.stop()
        self._folder.cleanup()

    def _list(self, _: ListPodResourcesRequest, __: grpc.ServicerContext) -> bytes:
        self.calls += 1
        self.answering.wait(60)
        if self.answer is not None:
            return self.answer()
        return ListPodResourcesResponse(pod_resources=self.pods).SerializeToString()
