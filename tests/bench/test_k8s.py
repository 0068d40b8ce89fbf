"""bench/k8s/run.py against a real Kubernetes API; what acts on the API is a stand-in (see cluster.py)."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml

from bench.k8s import collectors as taken
from bench.k8s import job
from bench.k8s.kubectl import BenchError, Kubectl, KubectlError
from tests.bench.cluster import MERGE, NODE, Cluster, until
from tests.bench.control_plane import api
from tests.bench.k8s_runner import (
    IMAGE,
    OURS,
    PLAN,
    RUN,
    SETS,
    THEIRS,
    Object,
    Runner,
    a_save,
    daemon_set,
    ended,
    in_file,
    installed,
    until_it_runs,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    with (
        api(tmp_path_factory.mktemp("api")) as running,
        Cluster(running, tmp_path_factory.mktemp("n")) as one,
    ):
        yield one


@pytest.fixture
def before(cluster: Cluster) -> Generator[list[Object]]:
    """Two collectors at work on the node: what has to be there afterwards."""
    cluster.image_is_missing = cluster.collectors_stay = False
    (cluster.folder / "code").write_text("0")
    for log in cluster.folder.glob("*.log"):
        log.unlink()
    for one in (OURS, THEIRS):
        cluster.api.call("POST", SETS, one)
    until("the collectors run", lambda: len(cluster.pods()) == 2)
    yield installed(cluster)
    cluster.holding.unlink(missing_ok=True)
    cluster.collectors_stay = False
    for path in (SETS, "/apis/batch/v1/namespaces/default/jobs"):
        cluster.api.call("DELETE", path, {"propagationPolicy": "Background"})
    cluster.api.call("DELETE", f"/api/v1/namespaces/default/configmaps?labelSelector={job.RUN}")
    until("the node is empty", lambda: not cluster.pods())


@pytest.fixture
def runner(cluster: Cluster, tmp_path: Path) -> Runner:
    return Runner(cluster, tmp_path)


# ---- what it refuses


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--node is missing"),
        ([f"--image={IMAGE}", "--yes-uninstall"], "--node is missing"),
        ([f"--node={NODE}", f"--image={IMAGE}"], "--yes-uninstall is missing"),
        ([f"--node={NODE}", f"--image={IMAGE}", "--yes"], "--yes"),
        ([f"--node={NODE}", "--yes-uninstall"], "--image is missing"),
        ([f"--node={NODE}", "--yes-uninstall", "--image=registry.invalid/x:1.0"], "is not pinned"),
        ([f"--node={NODE}", "--yes-uninstall", f"--image={IMAGE[:-1]}"], "is not pinned"),
        ([f"--node={NODE}", f"--image={IMAGE}", "--yes-uninstall", "--collector=x"], "KIND/NAMESPACE/NAME"),
    ],
)
def test_it_asks_nothing_of_the_cluster_without_what_it_needs(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    called = tmp_path / "called"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\ntouch {called}\n")
    kubectl.chmod(0o755)
    command = [sys.executable, str(RUN), f"--kubectl={kubectl}", f"--saves={tmp_path}/saves", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr.splitlines()[-1]
    assert not called.exists()
    assert not (tmp_path / "saves").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--node=n2"], "no node n2"),
        (["--namespace=none"], "no namespace none"),
        (["--collector=deployment/default/x"], "no deployment/default/x"),
    ],
)
def test_it_touches_nothing_when_something_is_not_there(
    arguments: list[str], says: str, cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    code, said = ended(runner.bench(*arguments))
    assert code == 1
    assert says in said
    assert installed(cluster) == before
    assert runner.nothing_is_left()


def test_it_refuses_a_collector_that_its_owner_would_put_back(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    owner = {"apiVersion": "v1", "kind": "ClusterPolicy", "name": "gpu", "uid": "u", "controller": True}
    patch = {"metadata": {"ownerReferences": [owner]}}
    cluster.api.call("PATCH", f"{SETS}/dcgm-exporter", patch, MERGE)
    code, said = ended(runner.bench())
    assert code == 1
    assert "daemonset/default/dcgm-exporter belongs to ClusterPolicy/gpu" in said
    assert [one["spec"] for one in installed(cluster)] == [one["spec"] for one in before]


# ---- what it does


def test_the_collectors_are_away_meanwhile_and_back_afterwards(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    uids = {one["metadata"]["uid"] for one in cluster.items(SETS)}
    code, said = ended(runner.bench())
    assert code == 0, said
    assert cluster.beside == []
    assert installed(cluster) == before
    assert uids.isdisjoint(one["metadata"]["uid"] for one in cluster.items(SETS))
    assert runner.nothing_is_left()
    assert (runner.folder / "results/plan.toml").read_text() == PLAN
    assert (runner.folder / "results/runs.jsonl").read_text() == '{"kind": "stand-in"}\n'
    (kept,) = runner.saves.iterdir()
    assert in_file(kept) == before
    assert kept.stat().st_mode & 0o777 == 0o600
    # It is also something that kubectl takes.
    assert [one["kind"] for one in yaml.safe_load(kept.read_text())["items"]] == ["DaemonSet", "DaemonSet"]


def test_the_results_of_a_kit_that_fails_are_kept(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    (cluster.folder / "code").write_text("1")
    code, said = ended(runner.bench())
    assert code == 1
    assert "the kit has ended with an error" in said
    assert (runner.folder / "results/runs.jsonl").exists()
    assert installed(cluster) == before
    assert runner.nothing_is_left()


def test_a_job_that_cannot_start_ends_it(cluster: Cluster, runner: Runner, before: list[Object]) -> None:
    cluster.image_is_missing = True
    code, said = ended(runner.bench())
    assert code == 1
    assert "ErrImageNeverPull no such image" in said
    assert installed(cluster) == before
    assert runner.nothing_is_left()
    assert not (runner.folder / "results").exists()


def test_collectors_that_do_not_end_end_it(cluster: Cluster, runner: Runner, before: list[Object]) -> None:
    cluster.collectors_stay = True
    code, said = ended(runner.bench("--patience-s=2"))
    assert code == 1
    assert "still on n1 after 2 s: default/" in said
    assert installed(cluster) == before
    assert runner.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_kit_and_puts_everything_back(
    number: signal.Signals, cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    cluster.holding.touch()
    process = runner.bench()
    until_it_runs(cluster)
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 128 + number, said
    assert installed(cluster) == before
    assert runner.nothing_is_left()
    assert any("ended early" in said for said in cluster.logs())


def test_ctrl_c_does_not_end_what_puts_everything_back(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    save = a_save(runner, before)
    cluster.api.call("DELETE", SETS, {"propagationPolicy": "Background"})
    kubectl = runner.folder / "kubectl"
    kubectl.write_text(
        f"""#!/bin/sh
        case " $* " in *" create "*) kill -s INT -- -$PPID ;; esac
        exec {runner.kubectl} "$@"
        """
    )
    kubectl.chmod(0o755)
    runner.kubectl = kubectl
    code, said = ended(runner.start(f"--restore={save.path}", "--patience-s=3"))
    assert code == 0, said
    assert "are being put back; wait" in said
    assert installed(cluster) == before


def test_it_goes_on_when_nobody_listens(cluster: Cluster, runner: Runner, before: list[Object]) -> None:
    cluster.holding.touch()
    process = runner.bench()
    until_it_runs(cluster)
    assert process.stdout
    process.stdout.close()
    cluster.holding.unlink()
    process.wait(120)
    assert installed(cluster) == before
    assert runner.nothing_is_left()


def test_a_second_run_leaves_the_first_alone(
    cluster: Cluster, runner: Runner, before: list[Object], tmp_path: Path
) -> None:
    cluster.holding.touch()
    first = runner.bench()
    until_it_runs(cluster)
    code, said = ended(runner.bench("--results=other"))
    assert code == 1
    assert str(runner.pending()[0]) in said
    code, said = ended(runner.start(f"--restore={runner.pending()[0]}"))
    assert code == 1
    assert "a run is still working with it" in said
    # From elsewhere, where that save is not known, and where no collector is to be seen any more.
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Runner(cluster, tmp_path / "elsewhere")
    options = [f"--node={NODE}", f"--image={IMAGE}", "--yes-uninstall", "--plan=plan.toml"]
    code, said = ended(elsewhere.start(*options, "--results=results"))
    assert code == 1
    assert "another run" in said
    assert cluster.items("/apis/batch/v1/jobs")
    cluster.holding.unlink()
    code, said = ended(first)
    assert code == 0, said
    assert installed(cluster) == before
    assert runner.nothing_is_left()


STEPS = (
    *("saved", "plan created", "first deleted", "second deleted", "job created", "results fetched"),
    *("job deleted", "first put back", "second put back", "plan deleted"),
)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(len(STEPS)), ids=STEPS)
def test_nothing_is_lost_when_it_is_killed(
    step: int, cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    # Each step is one call of kubectl. After the one meant, or before the first, its caller is killed.
    kubectl, calls = runner.folder / "kubectl", runner.folder / "calls"
    calls.touch()
    kubectl.write_text(
        f"""#!/bin/sh
        case " $* " in
            *" create "* | *" delete "* | *" logs "*" --tail=-1 ") ;;
            *) exec {runner.kubectl} "$@" ;;
        esac
        [ {step} -gt 0 ] || kill -9 $PPID
        {runner.kubectl} "$@"
        code=$?
        echo "$@" >>{calls}
        [ "$(wc -l <{calls})" != {step} ] || kill -9 $PPID
        exit $code
        """
    )
    kubectl.chmod(0o755)
    real, runner.kubectl = runner.kubectl, kubectl
    code, said = ended(runner.bench())
    assert code == -signal.SIGKILL, said
    runner.kubectl = real
    (save,) = runner.pending()
    assert in_file(save) == before
    code, said = ended(runner.bench("--results=other"))
    assert code == 1
    assert f"--restore {save}" in said
    code, said = ended(runner.start(f"--restore={save}"))
    assert code == 0, said
    assert installed(cluster) == before
    assert runner.nothing_is_left()


# ---- what it puts back


def test_what_somebody_has_changed_meanwhile_is_not_overwritten(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    other = copy.deepcopy(before)
    other[0]["spec"]["template"]["spec"]["containers"][0]["args"] = ["--interval", "5"]
    save = a_save(runner, other)
    code, said = ended(runner.start(f"--restore={save.path}"))
    assert code == 1
    assert "spec.template.spec.containers[0].args" in said
    assert str(save.path) in said
    assert runner.pending() == [save.path]
    assert installed(cluster) == before


def test_a_save_is_not_put_into_another_cluster(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    extra = daemon_set("stranger", {}, {})
    extra["metadata"]["namespace"] = "default"
    save = a_save(runner, [*before, extra], "another")
    code, said = ended(runner.start(f"--restore={save.path}"))
    assert code == 1
    assert "another cluster's" in said
    assert installed(cluster) == before


def test_what_cannot_be_put_back_is_named_with_its_file(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    lost = daemon_set("lost", {}, {})
    lost["metadata"]["namespace"] = "no-such-namespace"
    save = a_save(runner, [lost, *before])
    cluster.api.call("DELETE", f"{SETS}/dcgm-exporter")
    code, said = ended(runner.start(f"--restore={save.path}", "--patience-s=1"))
    assert code == 1
    assert "daemonset/no-such-namespace/lost" in said
    assert str(save.path) in said
    assert installed(cluster) == before  # the others are


def test_only_what_was_saved_is_deleted(cluster: Cluster, before: list[Object]) -> None:
    environment = cluster.api.environment()
    kubectl = Kubectl(
        ["env", *(f"{key}={value}" for key, value in environment.items()), cluster.api.kubectl.name]
    )
    kubectl.command = (*kubectl.command[:-1], str(cluster.api.kubectl))
    first, second = taken.find(kubectl, [("daemonset", "default", "dcgm-exporter")])
    # A change of the status is none of the object's.
    status = {"status": {"numberReady": 1}}
    cluster.api.call("PATCH", f"{SETS}/{first['metadata']['name']}/status", status, MERGE)
    taken.uninstall(kubectl, first, taken.cleaned(first))
    change = {"spec": {"minReadySeconds": 7}}
    cluster.api.call("PATCH", f"{SETS}/{second['metadata']['name']}", change, MERGE)
    with pytest.raises(BenchError, match="changed by somebody else"):
        taken.uninstall(kubectl, second, taken.cleaned(second))
    assert [one["metadata"]["name"] for one in installed(cluster)] == [second["metadata"]["name"]]
    with pytest.raises(KubectlError, match="NotFound") as refused:
        kubectl.delete(first)
    assert refused.value.reason == "NotFound"


def test_a_collector_that_comes_back_meanwhile_is_told(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    cluster.holding.touch()
    process = runner.bench()
    until_it_runs(cluster)
    cluster.api.call("POST", SETS, OURS)
    cluster.holding.unlink()
    code, said = ended(process)
    assert code == 1
    assert "expanse-ebpf was put back by somebody else meanwhile" in said
    assert installed(cluster) == before
    assert runner.nothing_is_left()


def test_a_job_that_is_deleted_ends_it(cluster: Cluster, runner: Runner, before: list[Object]) -> None:
    cluster.holding.touch()
    process = runner.bench()
    until_it_runs(cluster)
    path = f"/apis/batch/v1/namespaces/default/jobs/{job.NAME}"
    cluster.api.call("DELETE", path, {"propagationPolicy": "Background"})
    code, said = ended(process)
    assert code == 1
    assert "somebody has deleted the job" in said
    assert installed(cluster) == before
    assert runner.nothing_is_left()


def test_an_api_that_is_away_for_a_moment_is_asked_again(
    cluster: Cluster, runner: Runner, before: list[Object]
) -> None:
    save = a_save(runner, before)
    cluster.api.call("DELETE", SETS, {"propagationPolicy": "Background"})
    kubectl, calls = runner.folder / "kubectl", runner.folder / "calls"
    kubectl.write_text(
        f"""#!/bin/sh
        case " $* " in *" create "*)
            echo >>{calls}
            [ "$(wc -l <{calls})" -gt 2 ] || exec sh -c 'echo "connection refused" >&2; exit 1' ;;
        esac
        exec {runner.kubectl} "$@"
        """
    )
    kubectl.chmod(0o755)
    runner.kubectl = kubectl
    code, said = ended(runner.start(f"--restore={save.path}"))
    assert code == 0, said
    assert len(calls.read_text().splitlines()) == 4
    assert installed(cluster) == before
