"""The benchmark kit on one node of a Kubernetes cluster, without the collectors that run there.

Saves the collectors' objects, deletes them, runs a Job on the node, fetches its results, and puts the objects
back, whatever happens meanwhile. README.md, beside this file, says what that means for the cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.k8s import collectors, job, saved
from bench.k8s.kubectl import BenchError, Kubectl, KubectlError, Object, named

HERE = Path(__file__).parent
PLANS = HERE.parent / "plans"
_IMAGE = re.compile(r"\S+@sha256:[0-9a-f]{64}")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal that asks this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def say(line: str) -> None:
    """Tell the person at the terminal, or the log, what happens. Not being heard is no reason to stop."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def complain(line: str) -> None:
    """Tell what is wrong."""
    with contextlib.suppress(OSError):
        print(f"error: {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for a failure, 2 for wrong arguments, 128 and the signal's number."""
    options = parsed(arguments)
    for number in _SIGNALS:
        signal.signal(number, end)
    try:
        return restore(options) if options.restore else bench(options)
    except BenchError as error:
        complain(str(error))
        return 1
    except Ended as ended:
        return 128 + ended.number


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program with 2 when something is missing."""
    parser = argparse.ArgumentParser(
        prog="run.py", description="Measure what watching costs on one node.", allow_abbrev=False
    )
    parser.add_argument("--node", help="the node to measure on")
    parser.add_argument("--image", help="an image with expanse-ebpf and what the plan runs, by digest")
    parser.add_argument(
        "--yes-uninstall", action="store_true", help="yes, delete the collectors meanwhile, on all nodes"
    )
    parser.add_argument("--plan", type=Path, default=PLANS / "quick.toml", help="default: %(default)s")
    parser.add_argument("--results", type=Path, help="an empty or new folder for the results")
    parser.add_argument(
        *("--collector", "-c"),
        action="append",
        default=[],
        metavar="KIND/NAMESPACE/NAME",
        help="a further collector, such as daemonset/gpu/dcgm-exporter; again for more",
    )
    parser.add_argument("--namespace", default="default", help="of the job; default: %(default)s")
    parser.add_argument("--kubectl", default="kubectl", help="the kubectl to call")
    parser.add_argument("--context", help="of the kubeconfig; default: the current one")
    parser.add_argument("--runtime-class", default="", help="of the job, such as nvidia")
    parser.add_argument("--limit-h", type=float, default=24.0, help="how long the job may take")
    parser.add_argument("--start-s", type=float, default=600.0, help="how long it may take to start")
    parser.add_argument("--patience-s", type=float, default=300.0, help="for each step of the cluster's")
    parser.add_argument("--saves", type=Path, help="where the objects are kept meanwhile")
    parser.add_argument("--restore", type=Path, metavar="FILE", help="put the objects of a save back, only")
    options = parser.parse_args(arguments)
    if options.restore:
        return options
    if not options.node:
        parser.error("--node is missing: name the one node to measure on")
    if not options.yes_uninstall:
        parser.error(
            "--yes-uninstall is missing: the collectors are deleted while the job runs, on all nodes of the "
            "cluster, and put back afterwards"
        )
    if not options.image:
        parser.error("--image is missing: name one by digest, IMAGE@sha256:…")
    if not _IMAGE.fullmatch(options.image):
        parser.error(f"--image {options.image!r} is not pinned: name it by digest, IMAGE@sha256:…")
    if not 0 < options.limit_h <= 24 * 28:
        parser.error("--limit-h is more than 0 and at most 672")
    try:
        options.collector = [collectors.parse(text) for text in options.collector]
    except ValueError as error:
        parser.error(f"--collector: {error}")
    return options


def end(number: int, _frame: FrameType | None) -> NoReturn:
    """Of a signal. The next one finds that the collectors are being put back."""
    deafen()
    raise Ended(number)


def deafen() -> None:
    """From now on, no signal that can be caught ends this program before it has put everything back."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: say("the collectors are being put back; wait"))


def cluster_of(options: argparse.Namespace) -> tuple[Kubectl, str]:
    """The cluster and what it is told by."""
    kubectl = Kubectl([options.kubectl, *(["--context", options.context] if options.context else [])])
    system = kubectl.get("namespace", "", "kube-system")
    if system is None:
        raise BenchError("the cluster has no namespace kube-system, by which it is told from others")
    return kubectl, system["metadata"]["uid"]


def bench(options: argparse.Namespace) -> int:
    """Everything, in order; raises BenchError."""
    try:
        plan = options.plan.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{options.plan}: {error}; --plan names the plan") from None
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    results = options.results or Path(f"bench-{options.node}-{run}")
    if results.exists() and (not results.is_dir() or any(results.iterdir())):
        raise BenchError(f"{results} is there already; --results names another folder")
    kubectl, cluster = cluster_of(options)
    saves = saved.folder(options.saves)
    if left := saved.pending(saves, cluster):
        raise BenchError(
            f"the collectors of an earlier run are not back: {left[0]}; first: run.py --restore {left[0]}"
        )
    things = ready(options, kubectl)
    save = saved.Save(
        saves / f"{run}-{options.node}.yaml",
        *(run, cluster, options.node, options.namespace),
        tuple(collectors.cleaned(thing) for thing in things),
    )
    limit_s = max(1, round(options.limit_h * 3600))
    template = (HERE / "job.yaml").read_text(encoding="utf-8")
    pod = (options.namespace, options.node, options.image, limit_s, options.runtime_class)
    manifest = job.manifest(template, run, *pod)
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{results}: {error.strerror}; --results names another folder") from None
    save.write()
    with saved.held(save.path):
        say(f"saved: {', '.join(map(named, things)) or 'no collector is there'}; {save.path}")
        whole = False
        try:
            kubectl.create(job.config_map(plan, run, options.namespace))
            for thing, kept in zip(things, save.objects, strict=True):
                collectors.uninstall(kubectl, thing, kept)
                say(f"deleted: {named(thing)}")
            collectors.wait_gone(kubectl, save.objects, options.node, options.patience_s, say)
            kubectl.create(manifest)
            say(f"running on {options.node} ({run})")
            whole = job.follow(kubectl, options.namespace, run, options.start_s, say)
            names = job.fetch(kubectl, options.namespace, run, results)
            say(f"results: {results} ({', '.join(names)}); expanse-ebpf bench report {results}")
            alone(kubectl, save)
        except KubectlError as error:
            if error.reason == "AlreadyExists":
                raise BenchError(f"{error}: another run, or what is left of one") from None
            raise
        finally:
            back = put_back(kubectl, save, options.patience_s)
            with contextlib.suppress(OSError):
                results.rmdir()  # if nothing came into it
    if not whole:
        complain("the kit has ended with an error; what it has done is in the results")
    return 0 if whole and back else 1


def ready(options: argparse.Namespace, kubectl: Kubectl) -> list[Object]:
    """The collectors, once it is clear that a job can run; raises BenchError."""
    if kubectl.get("node", "", options.node) is None:
        raise BenchError(f"the cluster has no node {options.node}")
    if kubectl.get("namespace", "", options.namespace) is None:
        raise BenchError(f"the cluster has no namespace {options.namespace}; --namespace names another")
    things = collectors.find(kubectl, options.collector)
    theirs = {"kube-system", *(thing["metadata"]["namespace"] for thing in things)}
    pods = kubectl.list("pod", fields={"spec.nodeName": options.node})
    others = [pod for pod in pods if pod["metadata"]["namespace"] not in theirs]
    if others:
        say(f"note: {len(others)} other pods on {options.node} will disturb the measurement; drain it first")
    return things


def alone(kubectl: Kubectl, save: saved.Save) -> None:
    """Raise BenchError if a collector was there again before it was put back."""
    for thing in save.objects:
        metadata = thing["metadata"]
        if kubectl.get(thing["kind"], metadata["namespace"], metadata["name"]):
            raise BenchError(
                f"{named(thing)} was put back by somebody else meanwhile: the results are not "
                "without it; stop what does that (an operator, a GitOps controller) and begin again"
            )


def restore(options: argparse.Namespace) -> int:
    """Put back what an earlier run has saved; raises BenchError."""
    save = saved.read(options.restore)
    with saved.held(options.restore):
        kubectl, cluster = cluster_of(options)
        if cluster != save.cluster:
            raise BenchError(f"{save.path} is another cluster's; --context names the right one")
        return 0 if put_back(kubectl, save, options.patience_s) else 1


def put_back(kubectl: Kubectl, save: saved.Save, patience_s: float) -> bool:
    """End the job, put the objects back, and look whether they are: whether all is as before."""
    deafen()
    remove(kubectl, save, "job", patience_s)
    wrong = [text for thing in save.objects if (text := collectors.reinstall(kubectl, thing, patience_s))]
    for text in wrong:
        complain(text)
    if wrong:
        complain(
            f"not everything is back; the objects are in {save.path}: run.py --restore {save.path} "
            "(delete the file once they are there)"
        )
        return False
    remove(kubectl, save, "configmap", patience_s)
    after = save.done()
    say(f"back: {', '.join(map(named, save.objects)) or 'nothing was to be put back'}; {after}")
    return True


def remove(kubectl: Kubectl, save: saved.Save, kind: str, patience_s: float) -> None:
    """Delete what belongs to the run, and for a job wait for its pods. Whatever fails is said, no more."""
    labels = f"{job.RUN}={save.run}"
    try:
        where = ("-n", save.namespace, "-l", labels)
        kubectl.call("delete", kind, *where, "--ignore-not-found", "--wait=false")
        deadline = time.monotonic() + patience_s
        while kind == "job" and kubectl.list("pod", save.namespace, labels=labels):
            if time.monotonic() > deadline:
                raise BenchError("its pod does not end")
            time.sleep(collectors.POLL_S)
    except BenchError as error:
        say(f"note: the run's {kind} could not be removed: {error}")


if __name__ == "__main__":
    sys.exit(main())
