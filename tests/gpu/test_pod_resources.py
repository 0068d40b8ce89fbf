"""The kubelet's word on which pod holds which GPU, by a real server on a Unix socket."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.gpu.pod_resources import BadAnswerError, Claim, PodResources, parse_answer
from expanse_ebpf.wire.pod_resources_pb2 import ListPodResourcesResponse
from tests.controller.process import eventually
from tests.gpu.kubelet import Kubelet

GPU = "GPU-18db0e85-99e9-c746-8531-ffeb86328b39"
MIG = "MIG-5f2c2e6a-1f4e-5c64-9f3f-0c8f3c7c1a2b"

Ask = Callable[..., PodResources]


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    made = Kubelet()
    yield made
    made.close()


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Clients that are closed after the test."""
    made: list[PodResources] = []

    def start(socket: Path | str, every_s: float = 0.05, **settings: object) -> PodResources:
        made.append(PodResources(str(socket), every_s=every_s, **settings))  # type: ignore[arg-type]
        made[-1].claims()
        return made[-1]

    yield start
    for client in made:
        client.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def rounds(client: PodResources, count: int = 1) -> None:
    """Until the client has asked so many more times."""
    goal = client.polls + count
    eventually(lambda: client.polls >= goal)


# ---- what the answer says


def said(kubelet: Kubelet) -> dict[tuple[str, str], list[Claim]]:
    return parse_answer(ListPodResourcesResponse(pod_resources=kubelet.pods).SerializeToString())


def test_devices_of_plugins_are_carried_as_they_are_named(kubelet: Kubelet) -> None:
    kubelet.give("ml", "whole", "nvidia.com/gpu", GPU)
    kubelet.give("ml", "sliced", "nvidia.com/gpu.shared", f"{GPU}::0", f"{GPU}::11")
    kubelet.give("ml", "mig", "nvidia.com/mig-1g.10gb", MIG)
    kubelet.give("gke", "a", "nvidia.com/gpu", "nvidia0", "nvidia1/gi3", "nvidia2/vgpu1")
    assert said(kubelet) == {
        ("ml", "whole"): [Claim("main", "nvidia.com/gpu", GPU)],
        ("ml", "sliced"): [
            Claim("main", "nvidia.com/gpu.shared", f"{GPU}::0"),
            Claim("main", "nvidia.com/gpu.shared", f"{GPU}::11"),
        ],
        ("ml", "mig"): [Claim("main", "nvidia.com/mig-1g.10gb", MIG)],
        ("gke", "a"): [
            Claim("main", "nvidia.com/gpu", "nvidia0"),
            Claim("main", "nvidia.com/gpu", "nvidia1/gi3"),
            Claim("main", "nvidia.com/gpu", "nvidia2/vgpu1"),
        ],
    }


def test_two_pods_that_share_a_gpu_both_have_it(kubelet: Kubelet) -> None:  # K8-03
    kubelet.give("default", "a", "nvidia.com/gpu", "GPU-0::0")
    kubelet.give("default", "b", "nvidia.com/gpu", "GPU-0::1")
    claims = said(kubelet)
    assert [c.device_id for key in (("default", "a"), ("default", "b")) for c in claims[key]] == [
        "GPU-0::0",
        "GPU-0::1",
    ]


def test_pods_without_nvidia_devices_are_not_there(kubelet: Kubelet) -> None:
    kubelet.container("default", "web", "nginx")
    kubelet.give("default", "nic", "rdma/hca", "mlx5_0")
    kubelet.give("default", "other", "nvidia.company/gpu", GPU)
    assert said(kubelet) == {}


def test_containers_of_a_pod_are_told_apart(kubelet: Kubelet) -> None:
    kubelet.give("ml", "train", "nvidia.com/gpu", "GPU-a", container="worker")
    kubelet.give("ml", "train", "nvidia.com/gpu", "GPU-b", container="evaluator")
    assert [(c.container, c.device_id) for c in said(kubelet)["ml", "train"]] == [
        ("worker", "GPU-a"),
        ("evaluator", "GPU-b"),
    ]


@pytest.mark.parametrize(
    ("cdi", "driver", "device", "expected"),
    [
        ([f"k8s.gpu.nvidia.com/device={GPU}"], "gpu.nvidia.com", "gpu-0", [GPU]),
        (["k8s.gpu.nvidia.com/claim=a1"], "gpu.nvidia.com", GPU.lower(), [GPU]),
        ([f"nvidia.com/gpu={MIG}", f"nvidia.com/gpu={MIG.lower()}"], "gpu.nvidia.com", "x", [MIG]),
        ([f"nvidia.com/gpu=MIG-{GPU}/3/0"], "gpu.nvidia.com", "", [f"MIG-{GPU}/3/0"]),
        ([f"nvidia.com/gpu={GPU}"], "", "", [GPU]),
        # without a UUID it stays a name that no GPU has, so that it can be reported as unknown
        (["k8s.gpu.nvidia.com/device=gpu-0"], "gpu.nvidia.com", "gpu-0", ["gpu.nvidia.com/node-a/gpu-0"]),
        (["nvidia.com/gpu=0"], "", "", []),
        ([f"other.com/gpu={GPU}"], "", "", []),
        ([f"nvidia.com/gpu={GPU}"], "compute-domain.nvidia.com", "channel-0", []),
        ([f"notnvidia.com/gpu={GPU}"], "", "", []),
    ],
)
def test_dynamic_resources_count_when_their_driver_is_that_of_gpus(
    kubelet: Kubelet, cdi: list[str], driver: str, device: str, expected: list[str]
) -> None:
    kubelet.claim("ml", "dra", *cdi, driver=driver, device=device)
    assert [c.device_id for c in said(kubelet).get(("ml", "dra"), [])] == expected
    assert all(c.resource == "gpu.nvidia.com" for cs in said(kubelet).values() for c in cs)


def test_names_are_cleaned_and_bounded(kubelet: Kubelet) -> None:
    kubelet.give("a\nb", "p" * 5000, "nvidia.com/gpu\x1b[2J", "GPU-\x00" + "x" * 9999, container="c\r")
    ((namespace, pod), [claim]) = next(iter(said(kubelet).items()))
    assert (namespace, len(pod)) == ("a␊b", 256)
    assert claim.container == "c␍"
    assert claim.resource == "nvidia.com/gpu␛[2J"
    assert len(claim.device_id) == 256


def test_too_many_pods_or_devices_are_refused_and_not_cut() -> None:
    pods = ListPodResourcesResponse(pod_resources=[{"name": str(i)} for i in range(4096)])
    assert parse_answer(pods.SerializeToString()) == {}
    pods.pod_resources.add(name="one more")
    with pytest.raises(BadAnswerError, match="more than 4096 pods"):
        parse_answer(pods.SerializeToString())
    many = Kubelet()
    many.give("a", "b", "nvidia.com/gpu", *map(str, range(65537)))
    with pytest.raises(BadAnswerError, match="more than 65536 devices"):
        said(many)
    many.close()


@given(st.binary(max_size=300))
def test_garbage_is_claims_or_a_bad_answer(data: bytes) -> None:
    try:
        claims = parse_answer(data)
    except BadAnswerError:
        return
    assert all(isinstance(c, Claim) for cs in claims.values() for c in cs)


# ---- asking


def test_names_are_back_within_two_polls_of_a_new_kubelet(kubelet: Kubelet, ask: Ask) -> None:  # K8-01
    kubelet.give("ml", "a", "nvidia.com/gpu", "GPU-0")
    client = ask(kubelet.start().socket, keep_s=0.3)
    eventually(client.claims)
    assert client.reason == ""

    kubelet.stop()
    eventually(lambda: client.claims() is None)
    assert client.reason == f"no kubelet on this node: {kubelet.socket} is not there"

    kubelet.give("ml", "b", "nvidia.com/gpu", "GPU-1")
    kubelet.start()
    rounds(client, 2)
    assert client.claims() == {
        ("ml", "a"): [Claim("main", "nvidia.com/gpu", "GPU-0")],
        ("ml", "b"): [Claim("main", "nvidia.com/gpu", "GPU-1")],
    }


def test_an_answer_stands_for_a_minute_and_no_longer(kubelet: Kubelet, ask: Ask) -> None:
    clock = Clock()
    kubelet.give("ml", "a", "nvidia.com/gpu", "GPU-0")
    client = ask(kubelet.start().socket, clock=clock)
    eventually(client.claims)
    kubelet.stop()
    rounds(client, 2)
    clock.now += 59
    assert client.claims()
    assert client.reason == ""
    clock.now += 2
    assert client.claims() is None
    assert "no kubelet" in client.reason


def test_a_pod_that_ends_loses_its_claims(kubelet: Kubelet, ask: Ask) -> None:
    kubelet.give("ml", "a", "nvidia.com/gpu", "GPU-0")
    client = ask(kubelet.start().socket)
    eventually(client.claims)
    kubelet.pods.clear()
    eventually(lambda: client.claims() == {})
    assert client.reason == ""


def test_poke_asks_at_once(kubelet: Kubelet, ask: Ask) -> None:
    client = ask(kubelet.start().socket, every_s=3600)
    eventually(lambda: client.claims() == {})
    kubelet.give("ml", "a", "nvidia.com/gpu", "GPU-0")
    client.poke()
    eventually(client.claims)
    assert kubelet.calls == 2


def test_without_a_socket_nothing_is_imported_or_started(tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        "from expanse_ebpf.gpu.pod_resources import PodResources\n"
        f"client = PodResources({str(tmp_path / 'kubelet.sock')!r})\n"
        "print(client.claims(), client.reason)\n"
        "client.poke(); client.close()\n"
        "print(threading.active_count(), {'grpc', 'google.protobuf'} & set(sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == (f"None no kubelet on this node: {tmp_path}/kubelet.sock is not there\n1 set()\n")


# ---- whatever answers


def failure(client: PodResources) -> str:
    eventually(lambda: client.polls)
    assert client.claims() is None
    return client.reason


def test_a_hung_kubelet_is_given_up_and_asked_again(kubelet: Kubelet, ask: Ask) -> None:
    kubelet.give("ml", "a", "nvidia.com/gpu", "GPU-0")
    kubelet.answering.clear()
    client = ask(kubelet.start().socket, timeout_s=0.3)
    started = time.monotonic()
    assert client.claims() is None
    assert time.monotonic() - started < 0.2
    assert failure(client) == "the kubelet has not answered within 0.3 s"
    kubelet.answering.set()
    eventually(client.claims)


def test_closing_does_not_wait_for_a_hung_kubelet(kubelet: Kubelet, ask: Ask) -> None:
    kubelet.answering.clear()
    client = ask(kubelet.start().socket, timeout_s=60)
    eventually(lambda: kubelet.calls)
    before = set(threading.enumerate())
    assert any(thread.name == "pod-resources" for thread in before)
    started = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - started < 3
    assert not any(thread.name == "pod-resources" for thread in threading.enumerate())
    assert client.claims() is None


def test_a_socket_that_nobody_listens_on(kubelet: Kubelet, ask: Ask) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(kubelet.socket))
    assert failure(ask(kubelet.socket)).startswith(
        f"the kubelet cannot be reached at {kubelet.socket}: Connection refused"
    )


def test_another_service_is_not_the_kubelet(ask: Ask) -> None:
    other = Kubelet(service="v1alpha1.PodResourcesLister")
    try:
        reason = failure(ask(other.start().socket))
        assert reason.endswith("does not offer the pod-resources API v1 (Kubernetes 1.20 or later)")
    finally:
        other.close()


def test_an_answer_that_is_something_else(kubelet: Kubelet, ask: Ask) -> None:
    kubelet.answer = lambda: b"\x0a\xff\xff\xff\xff\x0f pods"
    assert failure(ask(kubelet.start().socket)) == (
        "the kubelet cannot be understood: its answer is not a list of pods"
    )


def test_a_server_that_speaks_another_protocol(kubelet: Kubelet, ask: Ask) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(kubelet.socket))
        server.listen()
        server.settimeout(20)

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        speaker = threading.Thread(target=speak)
        speaker.start()
        client = ask(kubelet.socket, timeout_s=1, every_s=3600)
        reason = failure(client)
        assert "cannot be reached" in reason or "not answered" in reason
        speaker.join(20)
        assert not speaker.is_alive()


def test_16_mib_are_taken_and_more_is_not(kubelet: Kubelet, ask: Ask) -> None:
    kubelet.give("ml", "a", "nvidia.com/gpu", "GPU-0")
    # What the client does not know is left out: an unknown field fills the rest.
    plain = ListPodResourcesResponse(pod_resources=kubelet.pods).SerializeToString()
    spare = (16 << 20) - len(plain) - 6
    length = bytes([spare & 127 | 128, spare >> 7 & 127 | 128, spare >> 14 & 127 | 128, spare >> 21])
    fill = b"\x82\x01" + length  # field 16, bytes
    whole = plain + fill + bytes(spare)
    assert len(whole) == 16 << 20
    kubelet.answer = lambda: whole
    client = ask(kubelet.start().socket)
    eventually(client.claims)
    client.close()
    kubelet.answer = lambda: whole + b"\x80\x01\x00"
    assert failure(ask(kubelet.socket)) == "the kubelet's answer is larger than 16 MiB"


def test_each_kind_of_failure_is_logged_once(
    kubelet: Kubelet, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "expanse_ebpf.gpu.pod_resources")
    kubelet.answer = lambda: b"\xff"
    client = ask(kubelet.start().socket)
    rounds(client, 3)
    away = kubelet.socket.with_name("away")
    kubelet.socket.rename(away)  # no kubelet: nothing to be logged
    rounds(client, 2)
    away.rename(kubelet.socket)
    rounds(client, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "which pod holds which GPU: the kubelet cannot be understood: its answer is not a list of pods"
    ]


def test_every_poll_has_a_connection_of_its_own(kubelet: Kubelet, ask: Ask) -> None:
    client = ask(kubelet.start().socket)
    eventually(lambda: client.claims() == {})
    moved = kubelet.socket.with_name("old")
    kubelet.socket.rename(moved)  # the old server is alive and still listens there
    other = Kubelet()
    other.give("ml", "new", "nvidia.com/gpu", "GPU-0")
    try:
        kubelet.socket.symlink_to(other.start().socket)
        eventually(client.claims)
    finally:
        other.close()
        moved.unlink(missing_ok=True)
