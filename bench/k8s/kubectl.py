"""What is asked of a cluster, by way of `kubectl`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Object = dict[str, Any]
Say = Callable[[str], None]
_REQUEST_S = 30
_CALL_S = 90.0


class BenchError(Exception):
    """What went wrong, in one line that names the cause and the remedy."""


class KubectlError(BenchError):
    """A call of kubectl failed; `reason` is the API server's word for it, such as "NotFound"."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def clean(text: str) -> str:
    """Text from the cluster as it may go to a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def named(thing: Object) -> str:
    """What a person calls an object: kind/namespace/name."""
    metadata = thing["metadata"]
    return f"{thing['kind'].lower()}/{metadata['namespace']}/{metadata['name']}"


class Kubectl:
    """One cluster."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)

    def call(self, *arguments: str, data: str = "") -> str:
        """What kubectl answers; raises KubectlError."""
        command = [*self.command, f"--request-timeout={_REQUEST_S}s", *arguments]
        try:
            done = subprocess.run(
                command,
                input=data,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=_CALL_S,
                check=False,
                # Ctrl-C is for this program alone: it has something to put back before it ends.
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise KubectlError(f"kubectl {arguments[0]} did not answer within {_CALL_S:.0f} s") from None
        except OSError as error:
            raise KubectlError(f"{command[0]}: {error.strerror}; --kubectl names another one") from None
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            reason = re.search(r"\((NotFound|AlreadyExists|Conflict)\)", said)
            raise KubectlError(f"kubectl {arguments[0]}: {clean(said)}", reason[1] if reason else "")
        return done.stdout

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """An object; None when there is none of that name. `namespace` "" for what is in none."""
        where = ["-n", namespace] if namespace else []
        try:
            found = self._object("get", kind, name, *where)
        except KubectlError as error:
            if error.reason == "NotFound":
                return None
            raise
        return found

    def list(
        self, kind: str, namespace: str = "", *, labels: str = "", fields: Mapping[str, str] | None = None
    ) -> list[Object]:
        """The objects of a kind with these labels (a selector) and fields, in all namespaces or in one."""
        options = ["-n", namespace] if namespace else ["-A"]
        if labels:
            options += ["-l", labels]
        if fields:
            options += ["--field-selector", ",".join(f"{name}={value}" for name, value in fields.items())]
        found = self._object("get", kind, *options).get("items")
        if not isinstance(found, list):
            raise KubectlError(f"kubectl get {kind}: no list in its answer")
        return found

    def _object(self, *arguments: str) -> Object:
        """The JSON object that a call answers; raises KubectlError for anything else."""
        try:
            found = json.loads(self.call(*arguments, "-o", "json"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise KubectlError(f"kubectl {' '.join(arguments[:2])}: no JSON object in its answer")
        return found

    def create(self, thing: Object) -> None:
        """Make an object just as it is; raises KubectlError, of the reason "AlreadyExists" too."""
        # Without --raw, kubectl would check what the server itself has given out, and write the annotation
        # anew by which `kubectl apply` knows what was applied last.
        self.call("create", "--raw", _path(thing), "-f", "-", data=json.dumps(thing))

    def delete(self, thing: Object) -> None:
        """Delete this very object, as it was read; KubectlError, "Conflict" if it has changed."""
        metadata = thing["metadata"]
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
        }
        self.call(
            "delete", "--raw", f"{_path(thing)}/{metadata['name']}", "-f", "-", data=json.dumps(options)
        )


def _path(thing: Object) -> str:
    """The API's path to all objects of a kind, in the namespace of this one."""
    group = f"apis/{thing['apiVersion']}" if "/" in thing["apiVersion"] else f"api/{thing['apiVersion']}"
    return f"/{group}/namespaces/{thing['metadata']['namespace']}/{thing['kind'].lower()}s"
