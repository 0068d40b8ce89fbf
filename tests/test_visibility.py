"""What a user without root may see of a report."""

from __future__ import annotations

from expanse_ebpf.visibility import GPU_FIELDS, HIDDEN_CONFLICT, visible
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_OPEN,
    GpuHolder,
    GpuProcess,
    GpuSample,
)
from tests.top.gpu_reports import gpu_report
from tests.top.serving import make_report


def test_visible_hides_what_sources_say_of_others() -> None:
    report = make_report(1)
    report.collector.sources[0].unavailable["job 4412"] = "its cgroup cannot be read"
    seen = visible(report, 1001)
    assert [j.identity.id for j in seen.jobs] == ["4412"]
    assert not seen.collector.sources[0].unavailable
    assert [s.reason for s in seen.collector.sources] == ["", "switched off"]
    assert report.collector.sources[0].unavailable  # the original is as it was


def test_a_user_sees_every_gpu_and_of_who_uses_it_only_their_own_jobs() -> None:
    report = gpu_report(1)
    report.gpus[2].processes.add(pid=4200, kind="compute", job="slurm/4411", resolved=True)
    own_words = "its process 4100 uses GPU-0, which it does not hold"
    cut = "SLURM_JOB_GPUS names GPU-0, which kubernetes/te…"
    not_reported = "SLURM_JOB_GPUS names GPU-0, which slurm/77 holds"  # past agent.max_jobs
    report.gpus[3].holders.add(scheduler="slurm", id="77", run=77, source="slurm")
    report.jobs[1].gpu.conflicts.extend([own_words, cut, not_reported])
    seen = visible(report, 1001)  # who has job 4412
    assert [gpu.uuid for gpu in seen.gpus] == [gpu.uuid for gpu in report.gpus]
    for gpu, whole in zip(seen.gpus, report.gpus, strict=True):
        for field in ("processes", "holders", "conflicts"):
            assert len(getattr(gpu, field)) == len(getattr(whole, field))
            gpu.ClearField(field)
        figures = GpuSample.FromString(whole.SerializeToString())
        for field in ("processes", "holders", "conflicts"):
            figures.ClearField(field)
        assert gpu == figures
    seen, whole_gpus = visible(report, 1001), report.gpus
    assert list(seen.gpus[0].holders) == [GpuHolder()]
    assert list(seen.gpus[0].processes) == [GpuProcess()]
    assert list(seen.gpus[2].holders) == [whole_gpus[2].holders[0], GpuHolder()]
    assert list(seen.gpus[2].processes) == [whole_gpus[2].processes[0], GpuProcess(), GpuProcess()]
    assert list(seen.gpu_events[0].holders) == list(seen.gpus[2].holders)
    assert (seen.gpu_events[0].uuid, seen.gpu_events[0].xid) == (whole_gpus[2].uuid, 79)
    assert seen.nvml == report.nvml
    # Its own contradictions stay, unless they name somebody else.
    hidden = HIDDEN_CONFLICT
    assert list(seen.jobs[0].gpu.conflicts) == [hidden, own_words, hidden, hidden]
    for secret in (b"4411", b"4413", b"notebook", b"resnet50"):
        assert secret not in seen.SerializeToString()
        assert secret in report.SerializeToString()  # which is as it was


def test_jobs_of_the_same_name_do_not_show_each_others_processes() -> None:
    report = gpu_report(1)
    for job in report.jobs[:2]:
        job.identity.scheduler, job.identity.id = "run", "train"
    for gpu in report.gpus[:2]:
        gpu.processes[0].job = "run/train"
        gpu.holders[0].scheduler, gpu.holders[0].id = "run", "train"
    for uid, holders in ((1000, 2), (1001, 0)):
        seen = visible(report, uid)
        assert [list(gpu.processes) for gpu in seen.gpus[:2]] == [[GpuProcess()]] * 2
        assert sum(gpu.holders[0].run == 1000 for gpu in seen.gpus[:2]) == holders


def test_what_is_added_to_gpus_later_stays_with_root_unless_it_is_a_number() -> None:
    texts = {
        field.name
        for field in GpuSample.DESCRIPTOR.fields
        if field.message_type is not None or field.type in (field.TYPE_STRING, field.TYPE_BYTES)
    }
    assert texts - GPU_FIELDS == {"processes", "holders", "conflicts"}
    assert texts >= GPU_FIELDS


def test_a_user_without_jobs_of_their_own_sees_a_report_without_gpus_as_it_is() -> None:
    seen = visible(make_report(1), 65534)
    assert not seen.HasField("nvml")
    assert (len(seen.gpus), len(seen.gpu_events)) == (0, 0)


def test_where_holders_are_left_out_no_contradiction_is_told_since_it_may_name_them() -> None:
    report = gpu_report(1)
    report.jobs[1].gpu.conflicts.append("CUDA_VISIBLE_DEVICES names GPU-0, which run/secret holds")
    assert "run/secret" in visible(report, 1001).jobs[0].gpu.conflicts[-1]  # nobody knows that name
    report.gpus[0].conflicts.append("… and 3 more holders")
    assert set(visible(report, 1001).jobs[0].gpu.conflicts) == {HIDDEN_CONFLICT}


def test_a_user_sees_the_windows_of_their_own_jobs_alone() -> None:
    report = make_report(1)
    for number, job in enumerate(report.jobs):
        report.traces.add(id=f"window-{number}", state=TRACE_STATE_OPEN, reason=f"of {job.identity.name}")
        report.traces[-1].identity.CopyFrom(job.identity)
    gone = report.traces.add(id="of-one-that-is-gone", state=TRACE_STATE_DONE)
    gone.identity.scheduler, gone.identity.id, gone.identity.run, gone.identity.uid = "slurm", "9", 9, 1001
    asked = report.traces.add(id="refused", state=TRACE_STATE_NO_TARGETS, reason="no job slurm/8")
    asked.identity.scheduler, asked.identity.id = (
        "slurm",
        "4412",
    )  # as it was asked for; no run of it is known
    report.trace_parts.add(id="window-1", index=0, parts=1, data=b"secret")
    seen = visible(report, 1001)
    assert [status.id for status in seen.traces] == ["window-1", "of-one-that-is-gone"]
    assert seen.traces[0] == report.traces[1]
    assert not seen.trace_parts
    assert [status.id for status in visible(report, 1000).traces] == ["window-0"]
    assert not visible(report, 65534).traces
    assert len(report.traces) == 5
