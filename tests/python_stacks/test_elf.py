"""ELF files: against pyelftools, and files that are damaged on purpose."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expanse_ebpf.python_stacks import elf as elf_module
from expanse_ebpf.python_stacks.elf import Elf, ElfError, gnu_hash, sysv_hash

SOURCE = """
int answer = 42;
static int hidden = 1;
int pre_answer(void) { return hidden; }
const unsigned long Constant = 0x0b0703f0;
int room[1000];
int main(void) { return pre_answer() - answer; }
"""


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("elf")
    (folder / "source.c").write_text(SOURCE)

    def make(*options: str) -> Path:
        output = folder / f"{'_'.join(options).replace('/', '')}.so"
        if not output.exists():
            command = ["gcc", "-g0", "-Os", "-o", output, *options, folder / "source.c"]
            subprocess.run(command, check=True)
        return output

    return make


KINDS = {
    "gnu": ["-shared", "-fPIC", "-Wl,--hash-style=gnu"],
    "sysv": ["-shared", "-fPIC", "-Wl,--hash-style=sysv"],
    "exported": ["-rdynamic"],
    "no PIE": ["-no-pie", "-fno-pie"],
    "static": ["-static"],
    "static PIE": ["-static-pie", "-fPIE"],
}


def true_symbols(data: bytes, table: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    section = ELFFile(io.BytesIO(data)).get_section_by_name(table)
    for symbol in section.iter_symbols() if section else []:
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name:
            found.setdefault(symbol.name, set()).add(symbol["st_value"])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_symbols_are_found_by_whatever_table_there_is(kind: str, build: Callable[..., Path]) -> None:
    data = build(*KINDS[kind]).read_bytes()
    elf = Elf(reader(data))
    truth = true_symbols(data, ".symtab")
    for name in ("answer", "pre_answer", "Constant", "room"):
        assert {elf.symbol(name)} == truth[name]
    assert elf.symbol("swer") is None  # the end of a name
    assert elf.symbol("answers") is None
    assert elf.content(elf.symbol("answer") or 0, 4) == struct.pack("<i", 42)
    assert elf.content(elf.symbol("room") or 0, 4) == b""  # .bss has no content
    assert struct.unpack("<Q", elf.content(elf.symbol("Constant") or 0, 8)) == (0x0B0703F0,)


@pytest.mark.parametrize("kind", ["gnu", "sysv", "exported"])
def test_sections_are_not_needed_for_dynamic_symbols(kind: str, build: Callable[..., Path]) -> None:
    data = build(*KINDS[kind]).read_bytes()
    without = data[:40] + bytes(8) + data[48:60] + bytes(4) + data[64:]  # e_shoff; e_shnum, e_shstrndx
    elf, whole = Elf(reader(without)), Elf(reader(data))
    assert elf.symbol("pre_answer") == whole.symbol("pre_answer") is not None
    assert elf.needed() == whole.needed() == (["libc.so.6"] if kind == "exported" else [])
    assert elf.section(".text") is None
    assert elf.section_content(".rodata") == b""
    assert elf.symbol("hidden") is None


def test_stripping_takes_away_what_is_not_dynamic(build: Callable[..., Path], tmp_path: Path) -> None:
    stripped = tmp_path / "stripped"
    subprocess.run(["strip", "-o", stripped, build(*KINDS["static"])], check=True)
    elf = Elf(reader(stripped.read_bytes()))
    assert elf.symbol("answer") is None
    assert elf.section(".data") is not None
    assert elf.needed() == []


def system_files() -> list[Path]:
    names = ["/bin/sh", sys.executable, shutil.which("gcc") or "/bin/ls"]
    names += [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line]
    return sorted({Path(name).resolve() for name in names})


@pytest.mark.parametrize("path", system_files(), ids=lambda path: path.name)
def test_it_agrees_with_pyelftools(path: Path) -> None:
    data = path.read_bytes()
    elf, theirs = Elf(reader(data)), ELFFile(io.BytesIO(data))
    truth = true_symbols(data, ".dynsym")
    chosen = random.Random(1).sample(sorted(truth), min(len(truth), 100))
    assert all(elf.symbol(name) in truth[name] for name in chosen)
    loads = [each for each in theirs.iter_segments() if each["p_type"] == "PT_LOAD"]
    assert [
        (each["p_offset"], each["p_vaddr"], each["p_filesz"], bool(each["p_flags"] & 1)) for each in loads
    ] == [tuple(segment) for segment in elf.segments]
    for section in theirs.iter_sections():
        ours = elf.section(section.name)
        assert ours is not None
        if section.name:
            first = theirs.get_section_by_name(section.name)
            assert (ours.address, ours.offset, ours.size) == (
                first["sh_addr"],
                first["sh_offset"],
                first["sh_size"],
            )
    constants = theirs.get_section_by_name(".rodata")
    assert elf.section_content(".rodata") == (constants.data() if constants else b"")
    dynamic = theirs.get_section_by_name(".dynamic")
    wanted = [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
    assert elf.needed() == wanted
    assert elf.machine == {"x64": "x86_64", "AArch64": "aarch64"}[theirs.get_machine_arch()]


def test_hashes_are_those_of_the_formats() -> None:
    # Both documented with these values: the GNU hash's section and the gABI's chapter on dynamic linking.
    assert gnu_hash(b"printf") == 0x156B2BB8
    assert sysv_hash(b"printf") == 0x077905A6


# ---- many functions at once


def true_functions(data: bytes, table: str) -> set[tuple[str, int]]:
    section = ELFFile(io.BytesIO(data)).get_section_by_name(table)
    return {
        (symbol.name, symbol["st_value"])
        for symbol in (section.iter_symbols() if section else [])
        if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] != "SHN_UNDEF"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_functions_are_found_all_at_once(kind: str, build: Callable[..., Path]) -> None:
    data = build(*KINDS[kind]).read_bytes()
    wanted = ["pre_answer", "main", "answer", "Constant", "swer", "not_there"]
    exported = set(Elf(reader(data)).exported(wanted).items())
    assert exported == {each for each in true_functions(data, ".dynsym") if each[0] in wanted}
    listed = Elf(reader(data)).listed(wanted)
    assert listed == {each for each in true_functions(data, ".symtab") if each[0] in wanted}
    assert {name for name, _ in listed} == {"pre_answer", "main"}


@pytest.mark.parametrize("path", system_files(), ids=lambda path: path.name)
def test_exported_functions_are_those_that_pyelftools_sees(path: Path) -> None:
    data = path.read_bytes()
    truth: dict[str, set[int]] = {}
    for name, value in true_functions(data, ".dynsym"):
        truth.setdefault(name, set()).add(value)
    chosen = random.Random(2).sample(sorted(truth), min(len(truth), 100))
    found = Elf(reader(data)).exported([*chosen, "cudaLaunchKernel"])
    assert set(found) == set(chosen)
    assert all(value in truth[name] for name, value in found.items())
    listed = Elf(reader(data)).listed(chosen)
    assert listed == {each for each in true_functions(data, ".symtab") if each[0] in chosen}


def test_hidden_functions_and_copies_of_static_ones_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.c").write_text(f"""
            __attribute__((noinline)) static int launch(int x) {{ return x * {number + 6}; }}
            __attribute__((visibility("hidden"))) int prelaunch_{number}(int x) {{ return launch(x) + 1; }}
            int other_{number}(int x) {{ return prelaunch_{number}(x) + 1; }}
        """)
    library = tmp_path / "library.so"
    options = ["-shared", "-fPIC", "-O1", "-o", library]
    subprocess.run(["gcc", *options, tmp_path / "1.c", tmp_path / "2.c"], check=True)
    data = library.read_bytes()
    wanted = ["launch", "prelaunch_1", "other_2", "1", "aunch"]
    truth = {each for each in true_functions(data, ".symtab") if each[0] in wanted}
    assert [name for name, _ in sorted(truth)] == ["launch", "launch", "other_2", "prelaunch_1"]
    assert Elf(reader(data)).exported(wanted).keys() == {"other_2"}
    assert Elf(reader(data)).listed(wanted) == truth
    # Wherever one part of a table ends and the next begins.
    for size in (24, 48, 72, 240):
        monkeypatch.setattr(elf_module, "_PART", size)
        assert Elf(reader(data)).listed(wanted) == truth
    subprocess.run(["strip", library], check=True)
    assert Elf(reader(library.read_bytes())).listed(wanted) == set()


def test_a_library_without_the_wanted_costs_little_reading() -> None:
    data = Path("/proc/self/exe").resolve().read_bytes()
    amount = 0

    def read(offset: int, size: int) -> bytes:
        nonlocal amount
        amount += size
        return data[offset : offset + size]

    assert Elf(read).exported([f"cudaFunction{number}" for number in range(300)]) == {}
    assert amount < 1 << 17


# ---- what is no such file


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", bytes(64), b"\x7fELF\x01\x01" + bytes(58), b"\x7fELF\x02\x02" + bytes(58)]
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ElfError):
        Elf(reader(data))


def question(data: bytes) -> int:
    """Ask everything; how many bytes were read for that."""
    amount = 0

    def read(offset: int, size: int) -> bytes:
        nonlocal amount
        assert 0 <= offset < offset + size < 1 << 63 or not size
        part = data[offset : offset + size]
        amount += len(part)
        return part

    for ask in (
        lambda elf: elf.symbol("pre_answer"),
        lambda elf: elf.symbol("not there"),
        lambda elf: elf.exported(["pre_answer", "main", "not there"]),
        lambda elf: elf.listed(["pre_answer", "main", "not there"]),
        lambda elf: elf.needed(),
        lambda elf: elf.section(".rodata"),
        lambda elf: elf.section_content(".rodata"),
        lambda elf: elf.content(2**64 - 1, 2**40),
    ):
        with contextlib.suppress(ElfError):
            ask(Elf(read))
    return amount


# Where the numbers are that lead on to others: the header, the segments, the hash tables, the sections.
@pytest.mark.parametrize("kind", ["gnu", "sysv", "static"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.randoms(use_true_random=False), changes=st.integers(1, 12))
def test_no_damage_breaks_it(
    kind: str, build: Callable[..., Path], seed: random.Random, changes: int
) -> None:
    data = bytearray(build(*KINDS[kind]).read_bytes())
    (sections,) = struct.unpack_from("<Q", data, 40)
    for _ in range(changes):
        near = seed.choice([0, 64, 64, 0x300, 0x1000, sections, sections, len(data) // 2])
        place = min(near + seed.randrange(512), len(data) - 1)
        value = seed.choice([0, 1, 255, seed.randrange(256)])
        data[place : place + 8] = seed.choice([bytes([value]), bytes([value]) * 8])
    if seed.random() < 0.2:
        del data[seed.randrange(len(data)) :]
    assert question(bytes(data)) < 8 * len(data) + (1 << 20)


def test_a_file_that_claims_to_be_huge_costs_little() -> None:
    """All sections are tables of symbols that overlap, of the largest size that is read."""
    size = 8 << 20
    data = a_header(sections=1000, sections_at=64) + a_section(2, 0, size, link=2) * 1000
    data += b"pre_answer\0" * ((size - len(data)) // 11)
    data += bytes(size - len(data))
    tracemalloc.start()
    try:
        amount = question(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert amount < 16 * size
    assert peak < 4 * size


# ---- files made by hand, with tables that no linker would make


def a_header(segments: int = 0, sections: int = 0, sections_at: int = 0, names: int = 0) -> bytes:
    ident = b"\x7fELF\x02\x01\x01"
    numbers = (3, 62, 1, 0, 64, sections_at, 0, 64, 56, segments, 64, sections, names)
    return struct.pack("<16sHHIQQQIHHHHHH", ident, *numbers)


def a_section(kind: int, offset: int, size: int, link: int = 0, name: int = 0) -> bytes:
    return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, 0, 0, 24)


def an_elf(tables: Mapping[int, bytes], load: int = 0x4000) -> bytes:
    """A file whose dynamic section points to the tables, by tag, one each 0x400 bytes."""
    places = {tag: 0x1000 + 0x400 * place for place, tag in enumerate(tables)}
    dynamic = b"".join(struct.pack("<QQ", tag, place) for tag, place in places.items())
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, load, load, 4096)
    segments += struct.pack("<IIQQQQQQ", 2, 4, 0x200, 0x200, 0, len(dynamic), len(dynamic), 8)
    data = bytearray(0x4000)
    data[:64] = a_header(segments=2)
    data[64 : 64 + len(segments)] = segments
    data[0x200 : 0x200 + len(dynamic)] = dynamic
    for tag, table in tables.items():
        data[places[tag] : places[tag] + len(table)] = table
    return bytes(data)


HASH, STRTAB, SYMTAB, GNU_HASH = 4, 5, 6, 0x6FFFFEF5
NAMES = b"\0answers\0answer\0"
ANSWERS, ANSWER = NAMES.index(b"answers"), NAMES.index(b"answer\0")


def symbols(*entries: tuple[int, int, int]) -> bytes:
    """(name, section, value)."""
    return bytes(24) + b"".join(
        struct.pack("<IBBHQQ", *(name, 0, 0, where, value, 0)) for name, where, value in entries
    )


def gnu_table(*hashes: int, buckets: int = 1, first: int = 1) -> bytes:
    return struct.pack(f"<4IQ{buckets}I{len(hashes)}I", buckets, first, 1, 0, 0, *[1] * buckets, *hashes)


def sysv_table(*chain: int, buckets: int = 1) -> bytes:
    return struct.pack(f"<2I{buckets}I{len(chain)}I", buckets, len(chain), *[1] * buckets, *chain)


WANTED = gnu_hash(b"answer")


@pytest.mark.parametrize(
    ("tables", "value"),
    [
        ({GNU_HASH: gnu_table(WANTED | 1), SYMTAB: symbols((ANSWER, 7, 42))}, 42),
        ({HASH: sysv_table(0, 0), SYMTAB: symbols((ANSWER, 7, 42))}, 42),
        # Not defined here, although it has an address: that of its entry in the procedure linkage table.
        ({GNU_HASH: gnu_table(WANTED | 1), SYMTAB: symbols((ANSWER, 0, 42))}, None),
        ({HASH: sysv_table(0, 0), SYMTAB: symbols((ANSWER, 0, 42))}, None),
        # Another name with the same hash comes before it.
        (
            {
                GNU_HASH: gnu_table(WANTED & ~1, WANTED | 1),
                SYMTAB: symbols((ANSWERS, 7, 41), (ANSWER, 7, 42)),
            },
            42,
        ),
        ({HASH: sysv_table(0, 2, 0), SYMTAB: symbols((ANSWERS, 7, 41), (ANSWER, 7, 42))}, 42),
        # A chain ends before it.
        ({GNU_HASH: gnu_table(1, WANTED | 1), SYMTAB: symbols((ANSWERS, 7, 41), (ANSWER, 7, 42))}, None),
        ({GNU_HASH: gnu_table(WANTED | 1, first=2), SYMTAB: symbols((ANSWER, 7, 42))}, None),
        # Chains without an end.
        ({HASH: sysv_table(0, 1), SYMTAB: symbols((ANSWERS, 7, 42))}, None),
        ({GNU_HASH: gnu_table(*[0] * 500), SYMTAB: symbols((ANSWERS, 7, 42))}, None),
        # Tables with nothing in them.
        ({GNU_HASH: bytes(16), SYMTAB: symbols((ANSWER, 7, 42))}, None),
        ({HASH: bytes(16), SYMTAB: symbols((ANSWER, 7, 42))}, None),
        ({SYMTAB: symbols((ANSWER, 7, 42))}, None),
    ],
)
def test_tables_made_by_hand(tables: dict[int, bytes], value: int | None) -> None:
    assert Elf(reader(an_elf({STRTAB: NAMES} | tables))).symbol("answer") == value


def function_symbols(*entries: tuple[int, int, int]) -> bytes:
    """(name, section, value), of functions."""
    return bytes(24) + b"".join(
        struct.pack("<IBBHQQ", name, 0x12, 0, where, value, 0) for name, where, value in entries
    )


def filtered_table(word: int) -> bytes:
    """One bucket with the wanted name, behind a filter of one word; its second hash is that shifted by 3."""
    return struct.pack("<4IQ2I", 1, 1, 1, 3, word, 1, WANTED | 1)


FIRST, SECOND = 1 << WANTED % 64, 1 << (WANTED >> 3) % 64


@pytest.mark.parametrize(
    ("word", "found"),
    [(FIRST | SECOND, True), (FIRST, False), (SECOND, False), (0, False), (2**64 - 1, True)],
)
def test_the_filter_is_asked_first(word: int, found: bool) -> None:
    tables = {STRTAB: NAMES, GNU_HASH: filtered_table(word), SYMTAB: function_symbols((ANSWER, 7, 42))}
    assert Elf(reader(an_elf(tables))).exported(["answer"]) == ({"answer": 42} if found else {})
    assert Elf(reader(an_elf(tables | {SYMTAB: symbols((ANSWER, 7, 42))}))).exported(["answer"]) == {}


def test_a_filter_beyond_the_file_is_refused() -> None:
    tables = {STRTAB: NAMES, SYMTAB: function_symbols((ANSWER, 7, 42))}
    beyond = struct.pack("<4I", 1, 1, 1 << 19, 3) + bytes(64)
    with pytest.raises(ElfError, match="beyond"):
        Elf(reader(an_elf(tables | {GNU_HASH: beyond}))).exported(["answer"])
    huge = struct.pack("<4I", 1, 1, 1 << 31, 3) + bytes(64)
    assert Elf(reader(an_elf(tables | {GNU_HASH: huge}))).exported(["answer"]) == {}


def test_listings_beyond_reason_are_refused() -> None:
    names = a_section(3, 0x800, len(NAMES))

    def listed(table: bytes) -> set[tuple[str, int]]:
        sections = a_section(2, 0x400, len(table), link=1) + names
        data = (a_header(sections=2, sections_at=64) + sections).ljust(0x400, b"\0") + table[:0x400]
        return Elf(reader(data.ljust(0x800, b"\0") + NAMES + table[0x400:])).listed(["answer"])

    assert listed(function_symbols((ANSWER, 7, 42))) == {("answer", 42)}
    assert listed(function_symbols((ANSWER, 7, 42))[:-1]) == set()  # cut
    huge = a_section(2, 0, 1 << 40, link=1) + a_section(3, 0, 1 << 40)
    with pytest.raises(ElfError, match="beyond reason"):
        Elf(reader(a_header(sections=2, sections_at=64) + huge)).listed(["answer"])
    nowhere = a_section(2, 0, 1 << 40, link=9) * 2
    assert Elf(reader(a_header(sections=2, sections_at=64) + nowhere)).listed(["answer"]) == set()
    many = b"answer\0" * 5000
    data = a_header(sections=2, sections_at=64) + a_section(2, 0, 64, link=1) + a_section(3, 0x400, len(many))
    with pytest.raises(ElfError, match="names beyond reason"):
        Elf(reader(data.ljust(0x400, b"\0") + many)).listed(["answer"])


@pytest.mark.parametrize(
    "tables",
    [
        {GNU_HASH: gnu_table(WANTED | 1), SYMTAB: b"", STRTAB: NAMES},
        {HASH: sysv_table(0, 0), SYMTAB: b"", STRTAB: NAMES},
        {STRTAB: NAMES, SYMTAB: symbols((ANSWER, 7, 42)), GNU_HASH: b""},
        {STRTAB: NAMES, SYMTAB: symbols((ANSWER, 7, 42)), HASH: b""},
    ],
)
def test_tables_beyond_the_file_are_refused(tables: dict[int, bytes]) -> None:
    last = next(tag for tag, table in tables.items() if not table)
    load = 0x1000 + 0x400 * list(tables).index(last)
    with pytest.raises(ElfError, match="beyond"):
        Elf(reader(an_elf(tables, load))).symbol("answer")


def test_content_ends_with_its_segment() -> None:
    elf = Elf(reader(an_elf({STRTAB: NAMES}, load=0x1004)))
    assert elf.content(0x1001, 100) == NAMES[1:4]
    assert elf.content(0x1004, 100) == b""


def test_undefined_symbols_are_no_answer_in_a_table_of_all_symbols() -> None:
    table = symbols((ANSWER, 0, 41), (ANSWER, 7, 42))
    sections = a_section(2, 0x400, len(table), link=2) * 2 + a_section(3, 0x800, len(NAMES))
    data = (
        (a_header(sections=3, sections_at=64) + sections).ljust(0x400, b"\0")
        + table.ljust(0x400, b"\0")
        + NAMES
    )
    assert Elf(reader(data)).symbol("answer") == 42
    assert (
        Elf(reader(data.replace(sections, sections[: 64 * 2] + a_section(3, 0x801, 3)))).symbol("answer")
        is None
    )
    beyond = a_section(2, 0x400, len(table), link=9) * 3
    assert Elf(reader(data.replace(sections, beyond))).symbol("answer") is None


def test_tables_larger_than_reason_are_not_read() -> None:
    """A file that never ends, as a sparse one may be."""
    largest = 0

    def endless(data: bytes) -> Callable[[int, int], bytes]:
        def read(offset: int, size: int) -> bytes:
            nonlocal largest
            largest = max(largest, size)
            return data[offset : offset + size].ljust(size, b"\0")

        return read

    many = endless(a_header(sections=2000, sections_at=64))
    with pytest.raises(ElfError, match="sections beyond reason"):
        Elf(many).section(".text")
    with pytest.raises(ElfError, match="segments beyond reason"):
        Elf(endless(a_header(segments=65)))
    huge = a_section(2, 0, 1 << 40, link=1) + a_section(3, 0, 1 << 40)
    elf = Elf(endless(a_header(sections=2, sections_at=64) + huge))
    assert elf.symbol("answer") is None
    assert elf.section_content("") == b""
    dynamic = struct.pack("<IIQQQQQQ", 2, 4, 0x200, 0x200, 0, 1 << 40, 1 << 40, 8)
    assert Elf(endless(a_header(segments=1) + dynamic)).needed() == []
    assert largest < 1 << 17
