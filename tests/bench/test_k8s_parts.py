"""What bench/k8s/run.py is made of, without a cluster."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from bench.k8s import collectors, job, saved
from bench.k8s.kubectl import BenchError


def test_a_damaged_save_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text in ("", "kind: List\n", "# expanse-ebpf bench/k8s: {}\nitems: []\n"):
        path.write_text(text)
        with pytest.raises(BenchError, match=r"x\.yaml is no save"):
            saved.read(path)
    assert saved.pending(tmp_path, "any") == [path]  # it may be somebody's only copy


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
