"""A real Kubernetes API for tests: Debian's etcd, its kubectl, and a kube-apiserver compiled from its source.

There is no package of the API server, so it is compiled once (minutes) from Debian's source package and kept
in the cache, which can be removed at any time. Nothing is installed. There are no controllers and no kubelet:
tests.bench.cluster stands in for those.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import http.client
import inspect
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.guests.image import locked
from tests.guests.packages import CACHE as GUESTS
from tests.guests.packages import KEYRING, Suite, mirror, unpack

CACHE = GUESTS.with_name("expanse-ebpf-kubernetes")
# The last suite whose source package of Kubernetes has more than kubectl, and the Go that compiles it.
_SUITE, _SOURCE, _GO = "bookworm", "kubernetes", "1.19"
_PROGRAMS = {"etcd-server": "etcd", "kubernetes-client": "kubectl"}
_TOKEN = "of-the-tests"
_READY_S = 120.0
_UNUSED_S = 30 * 86400  # what no run has used for so long is thrown away
Say = Callable[[str], None]


# ---- the programs


@functools.cache
def programs(say: Say = print) -> Path:
    """A folder with etcd, kubectl and kube-apiserver; made at the first call, which takes minutes."""
    recipe = [_SUITE, _SOURCE, _GO, inspect.getsource(_make), inspect.getsource(_compile)]
    kept = CACHE / hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            for other in CACHE.iterdir():
                unfinished = other.name.startswith(".making-")
                if unfinished or (other.is_dir() and time.time() - other.stat().st_mtime > _UNUSED_S):
                    shutil.rmtree(other)
            making = CACHE / f".making-{kept.name}"
            making.mkdir()
            _make(making, say)
            shutil.rmtree(making / "source")
            making.rename(kept)
    os.utime(kept)
    return kept


def _make(folder: Path, say: Say) -> None:
    source = folder / "source"
    with locked():
        suite = Suite(_SUITE, _called("dpkg", "--print-architecture").strip())
        unpack(suite.fetch([f"golang-{_GO}-go", f"golang-{_GO}-src"], alone=True), source / "go")
        unpack(suite.fetch(list(_PROGRAMS), alone=True), source / "debian")
    for name in _PROGRAMS.values():
        shutil.copy(source / "debian/usr/bin" / name, folder)
    # The suite's own settings, with a list of sources in place of its list of packages.
    (source / "lists/partial").mkdir(parents=True)
    (source / "sources.list").write_text(f"deb-src [signed-by={KEYRING}] {mirror()} {_SUITE} main\n")
    places = {"Dir::Etc::SourceList": source / "sources.list", "Dir::State::Lists": source / "lists"}
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in places.items())]
    environment = os.environ | {"APT_CONFIG": str(suite.folder / "apt.conf")}
    for command in (["update"], ["--download-only", "source", _SOURCE]):
        _called(*apt, *command, cwd=source, env=environment)
    (archive,) = source.glob("*.orig.tar.?z")
    tree = source / "gopath/src/k8s.io/kubernetes"
    tree.mkdir(parents=True)
    _called("tar", "-xf", str(archive), "-C", str(tree), "--strip-components=1")
    _compile(source, tree, folder, say)


def _compile(source: Path, tree: Path, folder: Path, say: Say) -> None:
    root = source / f"go/usr/lib/go-{_GO}"
    environment = os.environ | {
        "GOROOT": str(root),
        "GOPATH": str(source / "gopath"),
        "GOCACHE": str(source / "cache"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "GOFLAGS": "",
    }
    go = ["nice", "-n10", str(root / "bin/go")]
    # What OpenAPI says of the API is generated, and comes with no archive of the source.
    generator = source / "openapi-gen"
    package = "k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    _called(*go, "build", "-o", str(generator), package, cwd=tree, env=environment)
    wanted = set()
    for begin, name in (("pkg", "pkg"), ("staging/src/k8s.io", "vendor/k8s.io")):
        for path in (tree / begin).glob("**/*.go"):
            below = path.parent.relative_to(tree / begin)
            examples = below.parts[0] in ("sample-apiserver", "code-generator")
            if not examples and "\n// +k8s:openapi-gen=" in path.read_text():
                wanted.add(f"k8s.io/kubernetes/{name}/{below}")
    arguments = ["-i", ",".join(sorted(wanted)), "-p", "k8s.io/kubernetes/pkg/generated/openapi"]
    arguments += ["-O", "zz_generated.openapi", "-r", str(source / "violations")]
    arguments += ["-h", "hack/boilerplate/boilerplate.generatego.txt"]
    _called("nice", "-n10", str(generator), *arguments, cwd=tree, env=environment)
    # Without the libraries of the clouds, which are a third of the work.
    flags = ["-v", "-tags=providerless", "-ldflags=-s -w", "-o", str(folder / "kube-apiserver")]
    command = [*go, "build", *flags, "k8s.io/kubernetes/cmd/kube-apiserver"]
    with subprocess.Popen(command, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr
        lines, told = [], 0.0
        for line in build.stderr:
            lines.append(line)
            if time.monotonic() > told + 15:
                told = time.monotonic()
                say(f"kubernetes: compiling the API server, {len(lines)} packages so far")
    if build.returncode:
        raise RuntimeError(f"kube-apiserver does not compile:\n{''.join(lines[-30:])}")


def _called(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


# ---- the API


@dataclass(frozen=True)
class Api:
    """An API server that is up."""

    port: int
    folder: Path  # with kubeconfig, and the server's certificate and key as apiserver.crt and .key
    kubectl: Path

    def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """The answer of the API; raises LookupError when there is no such object, else RuntimeError."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1",
            self.port,
            timeout=30,
            context=ssl._create_unverified_context(),
        )
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": kind}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status == 404:
            raise LookupError(path)
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text}")
        return json.loads(text) if text.startswith("{") else text

    def environment(self) -> dict[str, str]:
        """What a kubectl needs: its configuration, and a home where it may leave something."""
        return {"KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(self.folder)}


@contextlib.contextmanager
def api(folder: Path) -> Generator[Api]:
    """An API server of one's own with an empty store, whose files are in `folder`."""
    binaries = programs()
    etcd, peers, port = free_ports(3)
    _called("openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048")
    (folder / "tokens").write_text(f'{_TOKEN},tests,tests,"system:masters"\n')
    server = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    configuration = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": server}],
        "users": [{"name": "tests", "user": {"token": _TOKEN}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(configuration))
    peer = f"http://127.0.0.1:{peers}"
    client = f"http://127.0.0.1:{etcd}"
    store = [
        *(str(binaries / "etcd"), f"--data-dir={folder}/etcd", "--name=tests", "--logger=zap"),
        *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
        f"--initial-cluster=tests={peer}",
    ]
    serve = [
        *(str(binaries / "kube-apiserver"), f"--etcd-servers={client}", f"--cert-dir={folder}"),
        *("--bind-address=127.0.0.1", "--advertise-address=192.0.2.1", f"--secure-port={port}"),
        *("--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none"),
        *(f"--token-auth-file={folder}/tokens", "--authorization-mode=AlwaysAllow"),
        *(
            "--service-account-issuer=https://tests.invalid",
            f"--service-account-key-file={folder}/accounts.key",
        ),
        f"--service-account-signing-key-file={folder}/accounts.key",
        *("--allow-privileged=true", "--disable-admission-plugins=ServiceAccount"),
    ]
    made = Api(port, folder, binaries / "kubectl")
    with _running(store, folder / "etcd.log"), _running(serve, folder / "apiserver.log") as process:
        deadline = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(OSError, LookupError, RuntimeError):
                if made.call("GET", "/readyz") == "ok":
                    made.call("GET", "/api/v1/namespaces/kube-system")
                    made.call("GET", "/api/v1/namespaces/default")
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the API server is not up:\n{(folder / 'apiserver.log').read_text()[-3000:]}"
                )
            time.sleep(0.1)
        yield made


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Generator[subprocess.Popen[bytes]]:
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()  # its store is thrown away: nothing has to be saved


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch, api(Path(scratch)) as running:
        print(f"kubeconfig: {running.folder}/kubeconfig; Enter ends it")
        input()
