"""The checks in conftest.py that guard all other tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest

CONFTEST = Path(conftest.__file__).read_text(encoding="utf-8")
SKIPS = """
import pytest

@pytest.mark.skip(reason="no such machine")
def test_marked(): pass

def test_inside(): pytest.skip("not today")

@pytest.mark.xfail
def test_known(): assert False

def test_good(): pass
"""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """A test run of its own, with this project's conftest."""
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers = slow: late\n")
    return pytester


def test_a_skip_fails_a_strict_run_and_says_why(inner: pytest.Pytester) -> None:
    inner.makepyfile(SKIPS)
    result = inner.runpytest("--strict-run")
    result.assert_outcomes(passed=1, failed=1, errors=1, xfailed=1)
    result.stdout.fnmatch_lines(["*skipped where every test must run: *no such machine*"])
    result.stdout.fnmatch_lines(["*skipped where every test must run: *not today*"])


def test_a_module_that_skips_itself_fails_a_strict_run(inner: pytest.Pytester) -> None:
    inner.makepyfile("import pytest\npytest.importorskip('no_such_module')\n")
    assert inner.runpytest("--strict-run").ret != pytest.ExitCode.OK


def test_elsewhere_a_skip_is_a_skip(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    inner.makepyfile(SKIPS)
    result = inner.runpytest()
    result.assert_outcomes(passed=1, skipped=2, xfailed=1)


def test_ci_makes_a_run_strict(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    inner.makepyfile("import pytest\ndef test_inside(): pytest.skip('not today')\n")
    inner.runpytest().assert_outcomes(failed=1)


def test_a_process_left_behind_fails_a_strict_run(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(conftest.MARK, raising=False)
    inner.makeconftest(CONFTEST.replace("PATIENCE_S = 5.0", "PATIENCE_S = 0.2"))
    inner.makepyfile(
        """
        import subprocess, pathlib
        def test_forgetful():
            child = subprocess.Popen(["sleep", "300"], start_new_session=True)
            pathlib.Path("child").write_text(str(child.pid))
            child.returncode = 0  # no warning from subprocess
        """
    )
    try:
        result = inner.runpytest_subprocess("--strict-run")
        result.stdout.fnmatch_lines(["left behind: process sleep 300 (pid *)"])
        assert result.ret == pytest.ExitCode.TESTS_FAILED
    finally:
        os.kill(int((inner.path / "child").read_text()), 9)


def test_slow_tests_run_last(inner: pytest.Pytester) -> None:
    inner.makepyfile("import pytest\n@pytest.mark.slow\ndef test_a(): pass\ndef test_b(): pass\n")
    inner.runpytest("-v").stdout.fnmatch_lines(["*test_b PASSED*", "*test_a PASSED*"])


def test_a_cgroup_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/expanse-run-x/deeper", "a/test-expanse-1", "a/system.slice"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(conftest, "CGROUPS", tmp_path)
    assert conftest.leftover_cgroups() == {f"{tmp_path}/a/expanse-run-x", f"{tmp_path}/a/test-expanse-1"}


def test_names_of_bpf_programs_are_read_from_their_sources() -> None:
    source = """
        SEC("tp_btf/sched_switch")
        int BPF_PROG(on_switch, bool preempt) { }
        SEC("raw_tp")
        int a_name_that_is_far_too_long(void *ctx) { }
        char LICENSE[] SEC("license") = "GPL";
    """
    assert conftest.program_names([source]) == {"on_switch", "a_name_that_is_"}
    real = [path.read_text(encoding="utf-8") for path in (conftest.ROOT / "bpf").glob("*.bpf.c")]
    assert len(conftest.program_names(real)) == sum(text.count('\nSEC("') for text in real)


def test_a_process_of_this_run_is_found_by_its_mark() -> None:
    environment = {**os.environ, conftest.MARK: "a-mark-of-this-test"}
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as child:
        try:
            assert [
                text.endswith(f"(pid {child.pid})")
                for text in conftest.leftover_processes("a-mark-of-this-test")
            ] == [True]
        finally:
            child.communicate(b"\n")
    assert conftest.leftover_processes("a-mark-of-this-test") == set()
