"""Which pod holds which device: the word of the kubelet's pod-resources API (v1).

The kubelet answers on a Unix socket on the node itself. It is asked in the background, and on a new
connection each time: a kubelet that was started anew has made a new socket under the old name.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from expanse_ebpf.text import clean
from expanse_ebpf.wire import transport

if TYPE_CHECKING:
    from expanse_ebpf.wire.pod_resources_pb2 import ClaimResource, ContainerResources
    from expanse_ebpf.wire.pod_resources_pb2 import PodResources as Pod

_log = logging.getLogger(__name__)

LIST = "/v1.PodResourcesLister/List"

_MAX_ANSWER = 16 << 20  # bytes
_MAX_PODS = 4096
_MAX_CLAIMS = 65536
_LEAST_PAUSE_S = 0.5  # between two questions, however often poke() is called
_CLOSING_S = 5.0

_VENDOR = "nvidia.com"
_DRIVER = f"gpu.{_VENDOR}"
_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# Names of dynamic resources are in small letters, and CDI's may be.
_DEVICE = re.compile(rf"(mig-gpu|gpu|mig)-({_UUID}(?:/[0-9]+/[0-9]+)?)", re.IGNORECASE)


class Claim(NamedTuple):
    """A container's hold on a device, in the words of whoever gave it; bounded and printable."""

    container: str
    resource: str  # "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"; of a dynamic resource its driver
    device_id: str  # raw: "GPU-…", "GPU-…::2", "MIG-…", "nvidia0/gi1"; or DRIVER/POOL/DEVICE


PodKey = tuple[str, str]  # namespace, pod
Claims = dict[PodKey, list[Claim]]


class BadAnswerError(Exception):
    """What the kubelet has said is no list of pods, or too long a one; the message says which."""


def parse_answer(data: bytes) -> Claims:
    """The claims on NVIDIA devices in a serialised ListPodResourcesResponse; raises BadAnswerError."""
    from google.protobuf.message import DecodeError

    from expanse_ebpf.wire.pod_resources_pb2 import ListPodResourcesResponse

    try:
        answer = ListPodResourcesResponse.FromString(data)
    except DecodeError:
        raise BadAnswerError("its answer is not a list of pods") from None
    if len(answer.pod_resources) > _MAX_PODS:
        raise BadAnswerError(f"its answer has more than {_MAX_PODS} pods")
    claims: Claims = {}
    count = 0
    for pod in answer.pod_resources:
        for claim in _claims(pod):
            count += 1
            if count > _MAX_CLAIMS:
                raise BadAnswerError(f"its answer has more than {_MAX_CLAIMS} devices")
            claims.setdefault((clean(pod.namespace), clean(pod.name)), []).append(claim)
    return claims


def _claims(pod: Pod) -> Iterator[Claim]:
    for container in pod.containers:
        name = clean(container.name)
        for resource, device in (*_plugin_devices(container), *_dynamic_devices(container)):
            yield Claim(name, clean(resource), clean(device))


def _plugin_devices(container: ContainerResources) -> Iterator[tuple[str, str]]:
    for devices in container.devices:
        if devices.resource_name.startswith(f"{_VENDOR}/"):
            for device in devices.device_ids:
                yield devices.resource_name, device


def _dynamic_devices(container: ContainerResources) -> Iterator[tuple[str, str]]:
    for resource in container.dynamic_resources:
        for claim in resource.claim_resources:
            names = [device.name for device in claim.cdi_devices]
            # Kubelets that do not name the driver yet have only the vendor in CDI's VENDOR/CLASS=NAME.
            vendors = {name.partition("/")[0] for name in names}
            if claim.driver_name == _DRIVER or (not claim.driver_name and _ours(vendors)):
                for device in _dynamic_device(claim, [*names, claim.device_name]):
                    yield claim.driver_name or _DRIVER, device


def _ours(vendors: Iterable[str]) -> bool:
    return any(vendor == _VENDOR or vendor.endswith(f".{_VENDOR}") for vendor in vendors)


def _dynamic_device(claim: ClaimResource, names: Iterable[str]) -> list[str]:
    """The UUIDs in the names; without one what names the device to Kubernetes, which is no GPU's name."""
    found = {f"{m[1].upper()}-{m[2].lower()}": None for name in names if (m := _DEVICE.search(name))}
    if not found and claim.device_name:
        return [f"{claim.driver_name}/{claim.pool_name}/{claim.device_name}"]
    return list(found)


class PodResources:
    """What the kubelet last said, asked again every `every_s` seconds by a thread.

    Nothing is started or imported before `socket` exists. `timeout_s` is the longest wait for an answer;
    what was said stands for `keep_s` after it, when no new answer comes.
    """

    def __init__(
        self,
        socket: str,
        *,
        every_s: float = 10.0,
        timeout_s: float = 3.0,
        keep_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._keep_s = keep_s
        self._clock = clock
        self._changed = threading.Condition()
        self._claims: Claims | None = None
        self._said_at = 0.0
        self._failure = "the kubelet was not asked yet"
        self._logged: set[str] = set()
        self._thread: threading.Thread | None = None
        self._call: Any = None
        self._poked = False
        self._closing = False
        self.polls = 0  # rounds that are over, however they went
        self.answers = 0  # of them, those that brought an answer

    def claims(self) -> Claims | None:
        """Claims by (namespace, pod), of pods that have any; None: not known, see `reason`.

        Answers at once. The result is shared: read it only. It is the same object until a kubelet's answer
        is another one.
        """
        with self._changed:
            if self._thread is None and not self._closing and self._present():
                self._thread = threading.Thread(target=self._run, name="pod-resources", daemon=True)
                self._thread.start()
            return self._claims if self._fresh() else None

    @property
    def reason(self) -> str:
        """Why claims() is None; "" when it is not."""
        with self._changed:
            return "" if self._fresh() else self._failure

    def poke(self) -> None:
        """Ask now: a pod has come or gone."""
        with self._changed:
            self._poked = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop asking; returns within seconds whatever the kubelet does. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            call, thread = self._call, self._thread
        if call is not None:
            call.cancel()
        if thread is not None:
            thread.join(_CLOSING_S)

    # ---- inside ---------------------------------------------------------------------------------

    def _fresh(self) -> bool:
        return self._claims is not None and self._clock() - self._said_at < self._keep_s

    def _present(self) -> bool:
        if os.path.exists(self._socket):  # noqa: PTH110 (each tick)
            return True
        self._failure = f"no kubelet on this node: {self._socket} is not there"
        return False

    def _run(self) -> None:
        while True:
            if self._present():
                self._poll()
            with self._changed:
                self.polls += 1
                self._changed.notify_all()
                least = min(_LEAST_PAUSE_S, self._every_s)
                self._changed.wait_for(lambda: self._closing, least)
                self._changed.wait_for(lambda: self._closing or self._poked, self._every_s - least)
                self._poked = False
                if self._closing:
                    return

    def _poll(self) -> None:
        try:
            claims = parse_answer(self._ask())
        except BadAnswerError as error:
            self._fail("answer", f"the kubelet cannot be understood: {error}")
        except Exception as error:  # gRPC's, of whatever class: the thread has to go on
            self._fail(*self._cause(error))
        else:
            with self._changed:
                if claims != self._claims:  # the same object tells that nothing has changed
                    self._claims = claims
                self._said_at = self._clock()
                self.answers += 1

    def _ask(self) -> bytes:
        grpc = transport.import_grpc()
        options = (
            ("grpc.max_receive_message_length", _MAX_ANSWER),
            ("grpc.use_local_subchannel_pool", 1),  # else a connection of before may be used again
            ("grpc.enable_http_proxy", 0),
        )
        with grpc.insecure_channel(f"unix:{quote(self._socket)}", options=options) as channel:
            ask = channel.unary_unary(LIST, request_serializer=None, response_deserializer=None)
            with self._changed:
                if self._closing:
                    return b""
                self._call = ask.future(b"", timeout=self._timeout_s)  # ListPodResourcesRequest is empty
            try:
                return bytes(self._call.result())
            finally:
                with self._changed:
                    self._call = None

    def _cause(self, error: Exception) -> tuple[str, str]:
        """A short word for the kind of failure, and a sentence."""
        code = getattr(getattr(error, "code", lambda: None)(), "name", "")
        details = clean(str(getattr(error, "details", lambda: "")() or ""))
        if code == "DEADLINE_EXCEEDED":
            return code, f"the kubelet has not answered within {self._timeout_s:g} s"
        if code == "UNIMPLEMENTED":
            return code, f"{self._socket} does not offer the pod-resources API v1 (Kubernetes 1.20 or later)"
        if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
            return "size", f"the kubelet's answer is larger than {_MAX_ANSWER >> 20} MiB"
        if code == "UNAVAILABLE":
            cause = details.rpartition("error: ")[2]  # what stands before is the address, three times
            return code, f"the kubelet cannot be reached at {self._socket}: {cause}"
        if code:
            return code, f"the kubelet has refused: {code} {details}".rstrip()
        kind = type(error).__name__
        return kind, f"the kubelet cannot be asked: {kind}: {clean(str(error))}"

    def _fail(self, kind: str, sentence: str) -> None:
        with self._changed:
            self._failure = sentence
            first = kind not in self._logged and not self._closing
            self._logged.add(kind)
        if first:
            _log.warning("which pod holds which GPU: %s", sentence)
