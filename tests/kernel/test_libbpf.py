"""The binding of libbpf: what it says when something is missing or refused."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import libbpf
from expanse_ebpf.kernel.lifecycle import Configuration


def test_a_missing_object_names_the_remedy() -> None:
    with pytest.raises(UnavailableError, match=r"nothing\..*\.bpf\.o is not installed: build it with"):
        libbpf.Object("nothing")


def test_a_damaged_object_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    import os

    (tmp_path / f"bad.{os.uname().machine}.bpf.o").write_bytes(b"\x7fELF" + bytes(200))
    with pytest.raises(libbpf.BpfError, match="opening BPF object bad"):
        libbpf.Object("bad", tmp_path)


def test_a_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise OSError("libbpf.so.1: cannot open shared object file")

    monkeypatch.setattr(libbpf, "_library", None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnavailableError, match="apt-get install libbpf1"):
        libbpf.library()


def test_configuration_of_another_size_is_refused() -> None:
    class Larger(ctypes.Structure):
        _fields_ = (("words", ctypes.c_uint32 * 64),)

    with libbpf.Object("task_lifecycle") as made, pytest.raises(libbpf.BpfError, match="another size"):
        made.configure(Larger())


def test_the_verifiers_words_are_kept() -> None:
    # Unified hierarchy, more CPUs than the program can go through: fine. A map of no entries is not.
    with libbpf.Object("task_lifecycle") as made:
        made.configure(Configuration(0, 0, 0, 2))
        made.resize("totals", 0)
        with pytest.raises(libbpf.BpfError) as caught:
            made.load()
    assert caught.value.errno == errno.EINVAL
    assert "totals" in caught.value.log


class Loader:
    """Stands for an object whose maps are too large until they are small enough."""

    def __init__(self, divisor: int, fits: int, code: int) -> None:
        self.divisor, self.fits, self.code = divisor, fits, code
        self.closed = False

    def load(self) -> None:
        if self.divisor < self.fits:
            raise libbpf.BpfError("loading", self.code)

    def close(self) -> None:
        self.closed = True


def test_short_of_memory_maps_are_halved_and_other_errors_are_not_tried_again() -> None:
    made: list[Loader] = []

    def make(fits: int, code: int) -> Loader:
        def one(divisor: int) -> Loader:
            made.append(Loader(divisor, fits, code))
            return made[-1]

        made.clear()
        return libbpf.load_shrinking(one)  # type: ignore[arg-type,return-value]

    assert make(4, errno.ENOMEM).divisor == 4
    assert [m.closed for m in made] == [True, True, False]
    with pytest.raises(libbpf.BpfError):
        make(8, errno.ENOMEM)
    assert all(m.closed for m in made)
    with pytest.raises(libbpf.BpfError):
        make(2, errno.EPERM)
    assert len(made) == 1


def test_map_calls() -> None:
    with libbpf.Object("task_lifecycle") as made:
        made.configure(Configuration(0, 0, 0, 2))
        made.load()
        slots = made.maps["slots"]
        key = (123).to_bytes(8, "little")
        assert slots.lookup(key, 8) is None
        slots.update(key, b"\x05\0\0\0\x01\0\0\0")
        assert slots.lookup(key, 8) == b"\x05\0\0\0\x01\0\0\0"
        assert slots.delete(key)
        assert not slots.delete(key)
        assert not any(p.attached for p in made.programs.values())
        program = made.programs["on_exit"]
        program.attach()
        program.attach()
        assert program.attached
        assert program.statistics()[1] >= 0
    assert not program.attached
