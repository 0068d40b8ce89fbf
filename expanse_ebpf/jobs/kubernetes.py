"""Names of pods, from the kubelet's (or the API server's) list."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from expanse_ebpf.errors import ConfigError
from expanse_ebpf.text import clean

log = logging.getLogger(__name__)

_MAX_LIST: Final = 32 << 20  # bytes
_MAX_PODS, _MAX_LABELS, _MAX_CONTAINERS = 4096, 32, 64
_MAX_LOGGED: Final = 4096
_CONFIG_HASH, _CONFIG_MIRROR = "kubernetes.io/config.hash", "kubernetes.io/config.mirror"
_CONTAINER_ID = re.compile(r"(?:[a-z-]{1,32}://)?([0-9a-f]{12,64})")
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of the list."""

    name: str
    namespace: str
    uid: str
    config_hash: str = ""  # of a static pod: the uid that its cgroup bears
    config_mirror: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    containers: Mapping[str, str] = field(default_factory=dict)  # id to name


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return clean(value) if isinstance(value, str) else ""


def _containers(status: dict[str, Any]) -> dict[str, str]:
    containers: dict[str, str] = {}
    for kind in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
        statuses = status.get(kind)
        for entry in statuses[:_MAX_CONTAINERS] if isinstance(statuses, list) else ():
            match = _CONTAINER_ID.fullmatch(_text(_dict(entry).get("containerID")))
            name = _text(_dict(entry).get("name"))
            if match and name:
                containers[match[1]] = name
    return containers


def _pod(item: Any) -> Pod | None:
    metadata = _dict(_dict(item).get("metadata"))
    name, namespace, uid = (_text(metadata.get(key)) for key in ("name", "namespace", "uid"))
    if not name or not namespace or not uid:
        return None
    annotations = _dict(metadata.get("annotations"))
    labels = list(_dict(metadata.get("labels")).items())[:_MAX_LABELS]
    return Pod(
        name,
        namespace,
        uid,
        _text(annotations.get(_CONFIG_HASH)),
        _text(annotations.get(_CONFIG_MIRROR)),
        {clean(key): _text(value) for key, value in labels if isinstance(value, str)},
        _containers(_dict(_dict(item).get("status"))),
    )


def parse_pod_list(data: bytes | str) -> list[Pod]:
    """The pods of a PodList in JSON; entries that are no pods are left out.

    Raises ValueError when the whole is not a list of pods.
    """
    import json

    if len(data) > _MAX_LIST:
        raise ValueError(f"more than {_MAX_LIST >> 20} MiB")
    try:
        items = _dict(json.loads(data)).get("items")
    except RecursionError:
        raise ValueError("nested too deep") from None
    if items is None:
        items = []
    if not isinstance(items, list):
        raise ValueError("no list of pods")
    return [pod for item in items[:_MAX_PODS] if (pod := _pod(item)) is not None]


def find(pods: Iterable[Pod], pod_uid: str) -> Pod | None:
    """The pod whose cgroup bears `pod_uid`: its own uid or, for a static pod, its configuration's hash."""
    wanted = pod_uid.replace("_", "-").lower()
    if not wanted:
        return None
    by_hash = None
    for pod in pods:
        if pod.uid.lower() == wanted:
            return pod
        if wanted in (pod.config_hash.lower(), pod.config_mirror.lower()):
            by_hash = pod
    return by_hash


class PodNames:
    """Pods by uid, fetched in the background when a pod is asked for that is not known yet.

    `lookup` answers at once with what is there. The list is fetched at most once in `pause_s`
    seconds; each pod that the list does not have, and each kind of failure, is logged once.
    """

    def __init__(self, url: str, *, pause_s: float = 10.0, timeout_s: float = 3.0) -> None:
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError(f"jobs.pods_url: {url!r} is not an http:// or https:// address")
        self._url = url
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self._pods: list[Pod] = []
        self._fetch: threading.Thread | None = None
        self._started = float("-inf")  # when the newest fetch began
        self._asked: dict[str, float] = {}  # unknown pods: when they were first asked for
        self._logged: set[str] = set()
        self.reason = "" if url else "jobs.pods_url is not set"  # why names are missing

    @property
    def available(self) -> bool:
        """Whether names can be had at all."""
        return bool(self._url)

    def lookup(self, pod_uid: str) -> Pod | None:
        """The pod with this uid or configuration hash, None while it is not known; never waits."""
        # Asked first: a fetch that ends after it may have brought the pod and is not held against it.
        running = self._fetch is not None and self._fetch.is_alive()
        pod = find(self._pods, pod_uid)
        if pod is not None:
            self._asked.pop(pod_uid, None)
            return pod
        if not self._url:
            self._log_once("", "pods are shown by uid: set jobs.pods_url to the kubelet's list of pods")
            return None
        now = time.monotonic()
        first = self._asked.setdefault(pod_uid, now)
        if not running and first <= self._started and not self.reason:
            # a list that was fetched after the question did not have it
            self._log_once(pod_uid, f"pod {clean(pod_uid, 64)} is not in {self._url}: it is shown by uid")
        if not running and now - self._started >= self._pause_s:
            self._started = now
            self._fetch = threading.Thread(target=self._refresh, name="pod-names", daemon=True)
            self._fetch.start()
        if len(self._asked) > _MAX_LOGGED:
            self._asked.clear()
        return None

    def _log_once(self, key: str, line: str) -> None:
        if key not in self._logged:
            if len(self._logged) >= _MAX_LOGGED:
                self._logged.clear()
            self._logged.add(key)
            log.warning("%s", line)

    def _refresh(self) -> None:
        try:
            self._pods = parse_pod_list(_download(self._url, self._timeout_s))
            self.reason = ""
        except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors
            self.reason = clean(str(error)) or type(error).__name__
            self._log_once(f"!{self.reason}", f"{self._url}: {self.reason}; pods are shown by uid")
        except Exception as error:  # http.client has errors of its own for what is not HTTP
            self.reason = f"not an HTTP answer ({type(error).__name__})"
            self._log_once(f"!{self.reason}", f"{self._url}: {self.reason}; pods are shown by uid")


def _download(url: str, timeout_s: float) -> bytes:
    """The body at `url`, within ten times `timeout_s`; raises OSError, ValueError or HTTPException."""
    # Here and not above: they bring ssl and email with them, and most nodes never fetch.
    import ssl
    import urllib.request

    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    if url.startswith("https://"):
        authority = _ACCOUNT / "ca.crt"
        context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
        handlers.append(urllib.request.HTTPSHandler(context=context))
        token = _ACCOUNT / "token"
        if token.exists():  # not to be carried along a redirection
            request.add_unredirected_header("Authorization", f"Bearer {token.read_text().strip()}")
    deadline = time.monotonic() + 10 * timeout_s
    body = bytearray()
    with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
        while chunk := answer.read1(1 << 16):
            body += chunk
            if len(body) > _MAX_LIST:
                raise ValueError(f"more than {_MAX_LIST >> 20} MiB")
            if time.monotonic() > deadline:
                raise TimeoutError("the answer takes too long")
    return bytes(body)
