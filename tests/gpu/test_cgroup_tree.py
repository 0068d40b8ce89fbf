"""A job's cgroups, by folders that stand in for them: they have the same inodes and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from expanse_ebpf.gpu.cgroup_tree import State, has_processes, read_tree, state


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for path in ("job/a/c", "job/a/d", "job/b"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "job/cgroup.procs").write_text("")
    (tmp_path / "job/link").symlink_to("a")
    return tmp_path / "job"


def test_the_top_comes_first_and_all_below_it_once(top: Path) -> None:
    tree = read_tree(str(top), 256)
    assert tree[0].directory == str(top)
    assert sorted(one.directory for one in tree) == [
        f"{top}{end}" for end in ("", "/a", "/a/c", "/a/d", "/b")
    ]
    assert all(one == state(one.directory) for one in tree)


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_large_tree_is_cut_after_one_too_many(most: int, top: Path) -> None:
    assert len(read_tree(str(top), most)) == most + 1


def test_a_state_changes_with_what_is_right_below(top: Path) -> None:
    before = state(str(top / "b"))
    (top / "b/new").mkdir()
    assert state(str(top / "b")) != before


def test_what_is_gone_has_no_inode(top: Path) -> None:
    gone = State(str(top / "gone"), 0, 0)
    assert read_tree(str(top / "gone"), 256) == (gone,)


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("7\n8\n", None, True),
        ("7\n8\n", {8, 9}, True),
        ("7\n8\n", {9}, False),
        ("", None, False),
        ("7\n", set(), False),
        ("x\n-7\n", None, False),
    ],
)
def test_processes_of_a_cgroup(text: str, wanted: set[int] | None, expected: bool, top: Path) -> None:
    (top / "cgroup.procs").write_text(text)
    assert has_processes(str(top), None if wanted is None else frozenset(wanted)) is expected
    assert not has_processes(str(top / "a"), None)
