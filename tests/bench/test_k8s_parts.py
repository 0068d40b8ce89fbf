"""What bench/k8s/run.py is made of, without a cluster."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from bench.k8s import collectors, job, run, saved
from bench.k8s.kubectl import BenchError, Kubectl


def test_a_damaged_save_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text in ("", "kind: List\n", "# expanse-ebpf bench/k8s: {}\nitems: []\n"):
        path.write_text(text)
        with pytest.raises(BenchError, match=r"x\.yaml is no save"):
            saved.read(path)
    assert saved.pending(tmp_path, "any") == [path]  # it may be somebody's only copy


@pytest.mark.parametrize("answer", ["hint: a newer kubectl is there", "", "[]", '{"items": 1}', "{}"])
def test_collectors_are_put_back_however_odd_the_answer_about_the_job_is(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    kubectl.chmod(0o755)
    thing = {"kind": "DaemonSet", "metadata": {"namespace": "watch", "name": "one"}, "spec": {}}
    save = saved.Save(tmp_path / "save.yaml", "run", "cluster", "node", "default", (thing,))
    save.write()
    back: list[object] = []
    monkeypatch.setattr(run, "deafen", lambda: None)
    monkeypatch.setattr(collectors, "reinstall", lambda kubectl, thing, patience_s: back.append(thing) or "")
    assert run.put_back(Kubectl([str(kubectl)]), save, patience_s=0.1)
    assert back == [thing]
    said = capsys.readouterr()
    assert "the run's job could not be removed" in said.out + said.err


def packed(*names: str) -> str:
    """A log with an archive of files of these names."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    text = base64.encodebytes(file.getvalue()).decode()
    total = hashlib.sha256(file.getvalue()).hexdigest()
    begin, end = "-----BEGIN EXPANSE-EBPF RESULTS-----", "-----END EXPANSE-EBPF RESULTS-----"
    return f"some progress\n{begin}\n{text}{end} {total}\n"


def test_an_archive_is_taken_out_of_a_log() -> None:
    assert job.unpacked(packed("./runs.jsonl", "./plan.toml")) == {"runs.jsonl": b"x", "plan.toml": b"x"}
    text = packed("a", "runs.jsonl")
    assert job.unpacked(text.replace("\n", "\r\n")).keys() == {"a", "runs.jsonl"}
    for damaged, says in (
        ("", "no archive"),
        (text[: len(text) // 2], "whole"),
        (text.replace("H4sI", "H4sJ", 1), "its sum"),
        (packed("../runs.jsonl"), "of the name"),
        (packed("/runs.jsonl"), "of the name"),
        (packed("plan.toml"), "no runs.jsonl"),
    ):
        with pytest.raises(ValueError, match=says):
            job.unpacked(damaged)


def test_a_selector_is_written_for_kubectl() -> None:
    expressions = [
        {"key": "a", "operator": "In", "values": ["x", "y"]},
        {"key": "b", "operator": "NotIn", "values": ["z"]},
        {"key": "c", "operator": "Exists"},
        {"key": "d", "operator": "DoesNotExist"},
    ]
    of = {"matchLabels": {"app": "one"}, "matchExpressions": expressions}
    assert collectors.selector(of) == "app=one,a in (x,y),b notin (z),c,!d"
