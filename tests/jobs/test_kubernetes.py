import http.server
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.errors import ConfigError
from expanse_ebpf.jobs.kubernetes import Pod, PodNames, find, parse_pod_list

UID = "3f0c9a1e-77b2-4d15-9c60-0a51d2e4b8f7"
HASH = "0123456789abcdef" * 2
B, C = "b2" * 32, "c3" * 32


def item(name="train-0", uid=UID, annotations=None, **more):
    metadata = {"name": name, "namespace": "ml", "uid": uid, "labels": {"app": "train"}}
    return {"metadata": {**metadata, "annotations": annotations or {}}, **more}


def pod_list(*items) -> bytes:
    return json.dumps({"kind": "PodList", "items": list(items)}).encode()


def test_pod():
    status = {
        "containerStatuses": [
            {"name": "worker", "containerID": f"containerd://{B}"},
            {"name": "waiting", "containerID": ""},
        ],
        "initContainerStatuses": [{"name": "setup", "containerID": f"cri-o://{C}"}],
    }
    (pod,) = parse_pod_list(pod_list(item(status=status)))
    assert pod == Pod("train-0", "ml", UID, "", "", {"app": "train"}, {B: "worker", C: "setup"})


@pytest.mark.parametrize(
    "bad",
    [None, 3, [], {}, {"metadata": None}, {"metadata": {"name": "x"}}, {"metadata": {"name": 1, "uid": 2}}],
)
def test_entries_that_are_no_pods_are_left_out(bad):
    assert [pod.name for pod in parse_pod_list(pod_list(bad, item()))] == ["train-0"]


def test_parts_of_the_wrong_type_are_left_out():
    (pod,) = parse_pod_list(
        pod_list({"metadata": {**item()["metadata"], "labels": {"a": 1}, "annotations": []}, "status": "x"})
    )
    assert (pod.name, pod.labels, pod.containers) == ("train-0", {}, {})


@pytest.mark.parametrize("data", [b"", b"{", b"[]x", b"\xff\xfe", b'{"items": 3}', b"[" * 100_000])
def test_what_is_no_list_of_pods(data):
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the parser's
        parse_pod_list(data)


def test_a_list_without_items():
    assert parse_pod_list(b'{"kind": "PodList", "items": null}') == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["metadata", "name", "namespace", "uid", "labels", "annotations", "status"])
            | st.sampled_from(["containerStatuses", "containerID"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.lists(JSON, max_size=4))
def test_hostile_lists_never_raise(items):
    parse_pod_list(pod_list(*items))


@pytest.mark.parametrize("key", ["kubernetes.io/config.hash", "kubernetes.io/config.mirror"])
def test_a_static_pod_is_found_by_its_hash(key):
    pods = parse_pod_list(pod_list(item("other", uid="x"), item(annotations={key: HASH})))
    assert (found := find(pods, HASH)) is not None
    assert found.name == "train-0"


def test_find():
    pods = parse_pod_list(pod_list(item()))
    assert find(pods, UID) is pods[0]
    assert find(pods, UID.replace("-", "_")) is pods[0]
    assert find(pods, HASH) is None
    assert find(pods, "") is None  # and does not meet pods without a hash


class Kubelet:
    """A real HTTP server with a list of pods that the test changes."""

    def __init__(self) -> None:
        self.body = pod_list()
        self.status = 200
        self.requests = 0
        self.answer = threading.Event()
        self.answer.set()
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kubelet.requests += 1
                kubelet.answer.wait(10)
                self.send_response(kubelet.status)
                self.end_headers()
                self.wfile.write(kubelet.body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/pods"

    def close(self) -> None:
        self.answer.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    server = Kubelet()
    yield server
    server.close()


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def settled(names: PodNames) -> None:
    until(lambda: names._fetch is not None and not names._fetch.is_alive())


def test_a_pod_is_named_once_the_list_has_come(kubelet):
    kubelet.body = pod_list(item(annotations={"kubernetes.io/config.hash": HASH}))
    names = PodNames(kubelet.url, pause_s=0)
    assert names.lookup(HASH) is None  # asked, not waited for
    until(lambda: names.lookup(HASH) is not None)
    assert names.lookup(HASH).name == "train-0"
    assert names.lookup(UID).name == "train-0"


def test_an_unknown_pod_is_logged_once(kubelet, caplog):
    kubelet.body = pod_list(item())
    names = PodNames(kubelet.url, pause_s=0)
    with caplog.at_level(logging.DEBUG):
        for _ in range(100):
            assert names.lookup(HASH) is None
            settled(names)
        names.lookup(HASH)
    assert len(caplog.records) == 1
    assert HASH in caplog.text


def test_lookups_do_not_wait_and_do_not_pile_up(kubelet):
    kubelet.answer.clear()
    names = PodNames(kubelet.url, pause_s=0)
    for number in range(200):
        assert names.lookup(f"{number:032x}") is None
    until(lambda: kubelet.requests)
    assert kubelet.requests == 1
    kubelet.answer.set()
    settled(names)


def test_the_list_is_fetched_once_in_a_while_only(kubelet):
    names = PodNames(kubelet.url, pause_s=3600)
    for number in range(20):
        names.lookup(f"{number:032x}")
        settled(names)
    assert kubelet.requests == 1


def test_known_pods_are_not_fetched_again(kubelet):
    kubelet.body = pod_list(item())
    names = PodNames(kubelet.url, pause_s=0)
    names.lookup(UID)
    settled(names)
    for _ in range(20):
        assert names.lookup(UID) is not None
    assert kubelet.requests == 1


@pytest.mark.parametrize(("status", "body"), [(500, b""), (200, b"<html>"), (200, b"[" * 50_000)])
def test_a_failing_kubelet_is_logged_once_and_recovers(kubelet, caplog, status, body):
    kubelet.status, kubelet.body = status, body
    names = PodNames(kubelet.url, pause_s=0)
    for _ in range(20):
        assert names.lookup(UID) is None
        settled(names)
    assert len(caplog.records) == 1
    assert names.reason
    kubelet.status, kubelet.body = 200, pod_list(item())
    until(lambda: names.lookup(UID) is not None)
    assert names.reason == ""


def test_nobody_listens(caplog):
    with socket.socket() as bound:  # and never listening
        bound.bind(("127.0.0.1", 0))
        names = PodNames(f"http://127.0.0.1:{bound.getsockname()[1]}/pods", pause_s=0)
        for _ in range(5):
            assert names.lookup(UID) is None
            settled(names)
    assert len(caplog.records) == 1


def test_without_an_address_nothing_is_fetched(caplog):
    names = PodNames("")
    for _ in range(100):
        assert names.lookup(UID) is None
    assert len(caplog.records) == 1
    assert "jobs.pods_url" in caplog.text
    assert not names.available


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "127.0.0.1:10255/pods"])
def test_other_addresses_are_refused(url):
    with pytest.raises(ConfigError, match="pods_url"):
        PodNames(url)
