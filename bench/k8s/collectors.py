"""The collectors' objects: which they are, taking them away, and putting them back as they were."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

from bench.k8s.kubectl import BenchError, Kubectl, KubectlError, Object, Say, clean, named

OURS = "app.kubernetes.io/part-of=expanse-ebpf"
KINDS = {"daemonset": "DaemonSet", "deployment": "Deployment", "statefulset": "StatefulSet"}
POLL_S = 1.0
# Set by the server, and of no meaning for an object that is made anew.
_OF_SERVER = (
    *("uid", "resourceVersion", "creationTimestamp", "generation", "selfLink", "managedFields"),
    *("deletionTimestamp", "deletionGracePeriodSeconds"),
)
# Kept by the controllers. Everything else stays: Helm and `kubectl apply` know their objects by annotations.
_OF_CONTROLLERS = ("deprecated.daemonset.template.generation", "deployment.kubernetes.io/revision")


def parse(text: str) -> tuple[str, str, str]:
    """(kind, namespace, name) out of KIND/NAMESPACE/NAME; raises ValueError."""
    parts = text.split("/")
    if len(parts) != 3 or not all(parts) or parts[0].lower() not in KINDS:
        raise ValueError(f"{text!r} is not KIND/NAMESPACE/NAME, with one of the kinds {', '.join(KINDS)}")
    return parts[0].lower(), parts[1], parts[2]


def find(kubectl: Kubectl, further: Sequence[tuple[str, str, str]]) -> list[Object]:
    """Our DaemonSets and the further objects, as they are; BenchError for one that cannot be put back."""
    found = kubectl.list("daemonset", labels=OURS)
    for kind, namespace, name in further:
        thing = kubectl.get(kind, namespace, name)
        if thing is None:
            raise BenchError(f"there is no {kind}/{namespace}/{name}, which --collector names")
        if thing["metadata"]["uid"] not in [other["metadata"]["uid"] for other in found]:
            found.append(thing)
    for thing in found:
        refuse(thing)
    return found


def refuse(thing: Object) -> None:
    """Raise BenchError for what would come back by itself, or not whole."""
    metadata = thing["metadata"]
    if metadata.get("deletionTimestamp"):
        raise BenchError(f"{named(thing)} is being deleted; wait until it is gone")
    for owner in metadata.get("ownerReferences", ()):
        if owner.get("controller"):
            raise BenchError(
                f"{named(thing)} belongs to {clean(owner['kind'])}/{clean(owner['name'])}, which would put "
                "it back at once; switch it off there, and leave it out here"
            )
    retention = thing["spec"].get("persistentVolumeClaimRetentionPolicy") or {}
    if retention.get("whenDeleted") == "Delete":
        raise BenchError(f"{named(thing)} would take its volumes with it (whenDeleted is Delete)")


def cleaned(thing: Object) -> Object:
    """An object without what the server has set: what has to be created to have it back."""
    kept = copy.deepcopy({key: value for key, value in thing.items() if key != "status"})
    metadata = kept["metadata"]
    for name in _OF_SERVER:
        metadata.pop(name, None)
    for name in _OF_CONTROLLERS:
        metadata.get("annotations", {}).pop(name, None)
    if not metadata.get("annotations", True):
        del metadata["annotations"]
    return kept


def uninstall(kubectl: Kubectl, thing: Object, saved: Object) -> None:
    """Delete an object if it still is what was saved; raises BenchError."""
    for _ in range(10):  # its status changes with every pod, and that is a change like any other
        try:
            kubectl.delete(thing)
            return
        except KubectlError as error:
            if error.reason != "Conflict":
                raise
        current = kubectl.get(thing["kind"], thing["metadata"]["namespace"], thing["metadata"]["name"])
        if current is None or cleaned(current) != saved:
            raise BenchError(f"{named(thing)} was changed by somebody else just now; begin again")
        thing = current
    raise BenchError(f"{named(thing)} changes all the time, and could not be deleted")


def wait_gone(kubectl: Kubectl, things: Sequence[Object], node: str, patience_s: float, say: Say) -> None:
    """Wait until none of the objects' pods is left on the node; raises BenchError."""
    end = time.monotonic() + patience_s
    told: list[str] = []
    for thing in things:
        namespace, labels = thing["metadata"]["namespace"], selector(thing["spec"]["selector"])
        while pods := kubectl.list("pod", namespace, labels=labels, fields={"spec.nodeName": node}):
            names = [f"{namespace}/{pod['metadata']['name']}" for pod in pods]
            if names != told:
                say(f"waiting for {', '.join(names)} to end")
                told = names
            if time.monotonic() > end:
                raise BenchError(f"still on {node} after {patience_s:.0f} s: {', '.join(names)}")
            time.sleep(POLL_S)


def selector(of: Object) -> str:
    """A LabelSelector as kubectl's -l takes it."""
    terms = [f"{key}={value}" for key, value in of.get("matchLabels", {}).items()]
    for each in of.get("matchExpressions", ()):
        key, values = each["key"], ",".join(each.get("values", ()))
        terms.append(
            {
                "In": f"{key} in ({values})",
                "NotIn": f"{key} notin ({values})",
                "Exists": key,
                "DoesNotExist": f"!{key}",
            }[each["operator"]]
        )
    return ",".join(terms)


def reinstall(kubectl: Kubectl, saved: Object, patience_s: float) -> str:
    """Put an object back and look whether it is there as it was: "" or what is wrong. Can be repeated."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return _put_back(kubectl, saved)
        except KubectlError as error:
            if time.monotonic() > end:
                return f"{named(saved)}: {error}"
        time.sleep(POLL_S)


def _put_back(kubectl: Kubectl, saved: Object) -> str:
    metadata = saved["metadata"]

    def look() -> Object | None:
        return kubectl.get(saved["kind"], metadata["namespace"], metadata["name"])

    found = look()
    if found and found["metadata"].get("deletionTimestamp"):
        raise KubectlError("the old one is still being deleted")
    if not found:
        kubectl.create(saved)
        found = look()
        if not found:
            raise KubectlError("it is gone again after it was made")
    differs = difference(saved["spec"], found["spec"], "spec")
    for part in ("labels", "annotations"):
        there = found["metadata"].get(part, {})
        differs = differs or next(
            (f"{part}: {key}" for key, value in metadata.get(part, {}).items() if there.get(key) != value), ""
        )
    return f"{named(saved)} is there, but is not what was saved: {clean(differs)}" if differs else ""


def difference(one: Any, other: Any, path: str) -> str:
    """The path of the first part that differs; "" when there is none."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        parts = (difference(one.get(key), other.get(key), f"{path}.{key}") for key in keys)
        return next(filter(None, parts), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(*pair, f"{path}[{at}]") for at, pair in pairs)), "")
    return "" if one == other else path
