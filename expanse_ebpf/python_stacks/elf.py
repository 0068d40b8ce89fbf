"""As much of an ELF file as it takes to find CPython's runtime in it, or a library's functions.

The file belongs to somebody's job and may be anything: every size and count in it is checked, no more
than some MiB are read at once, and only ElfError comes out. Formats: the ELF specification (gABI), 64 bits,
little-endian; the GNU hash table as glibc's loader reads it (elf/dl-lookup.c).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import NamedTuple

MACHINES = {62: "x86_64", 183: "aarch64"}  # EM_X86_64, EM_AARCH64, as uname names them

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<QQ")
_PT_LOAD, _PT_DYNAMIC, _PF_X = 1, 2, 1
_SHT_SYMTAB, _SHT_NOBITS, _SHT_DYNSYM = 2, 8, 11
_STT_FUNC = 2
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 1, 4, 5, 6, 0x6FFFFEF5

# More than any interpreter has: CPython's have some 12 segments, 40 sections and 1 MiB of symbols.
_MOST_SEGMENTS, _MOST_SECTIONS, _MOST_DYNAMIC = 64, 1024, 512
_LONGEST_CHAIN = 256  # symbols in one bucket of a hash table
_LONGEST_NAME = 256
_LARGEST_TABLE = 8 << 20
_MOST_PLACES = 4  # of a name in a table of names, as the end of longer names
_MOST_ENTRIES = 1024  # where the bytes of a table of symbols look like that name's
_LARGEST_LISTING = 128 << 20  # a table of all symbols or of their names that is read a part at a time
_PART = _SYMBOL.size << 15
_BEGINNING = 4  # bytes of a name that are looked for first
_MOST_FUNCTIONS = 4096  # with wanted names, in one file

_Tags = dict[int, list[int]]  # the dynamic section: the values of each tag
Read = Callable[[int, int], bytes]  # (offset, size): so many bytes of the file, or as many as there are


class ElfError(Exception):
    """Not such a file, or damaged."""


class Segment(NamedTuple):
    """A part of the file that is mapped; its address is that before relocation."""

    offset: int
    address: int
    size: int  # in the file; in memory it may be larger
    executable: bool


class Section(NamedTuple):
    """A section, as the linker made it."""

    name: int  # where in the table of names
    kind: int
    address: int
    offset: int
    size: int
    link: int


class Elf:
    """One file; each question reads what it needs of it."""

    def __init__(self, read: Read) -> None:
        self._file = read
        header = _HEADER.unpack(self._read(0, _HEADER.size))
        if not header[0].startswith(b"\x7fELF\x02\x01"):
            raise ElfError("not a 64-bit little-endian ELF file")
        self.machine: str = MACHINES.get(header[2], f"ELF machine {header[2]}")
        self._sections_at, (self._section_size, self._section_count, self._names) = header[6], header[11:]
        self.segments: list[Segment] = []
        self._dynamic: tuple[int, int] | None = None
        segments_at, size, count = header[5], header[9], header[10]
        if count > _MOST_SEGMENTS or (count and size != _SEGMENT.size):
            raise ElfError("segments beyond reason")
        for kind, flags, offset, address, _, length, _, _ in _SEGMENT.iter_unpack(
            self._read(segments_at, count * size)
        ):
            if kind == _PT_LOAD:
                self.segments.append(Segment(offset, address, length, bool(flags & _PF_X)))
            elif kind == _PT_DYNAMIC:
                self._dynamic = (offset, length)

    def content(self, address: int, size: int) -> bytes:
        """Up to `size` bytes that the file has for `address`; b"" where it has none, as for .bss."""
        for segment in self.segments:
            into = address - segment.address
            if 0 <= into < segment.size:
                return self._read(segment.offset + into, min(size, segment.size - into), exactly=False)
        return b""

    def needed(self) -> list[str]:
        """Names of the shared libraries that it asks for."""
        tags = self._tags()
        names = tags.get(_DT_STRTAB, [0])[0]
        return [self._text(names + name) for name in tags.get(_DT_NEEDED, [])]

    def symbol(self, name: str) -> int | None:
        """The address of a symbol that is defined here, by the loader's tables or else by all symbols."""
        wanted, tags = name.encode(), self._tags()
        found = self._by_gnu_hash(wanted, tags)
        if found is None:
            found = self._by_hash(wanted, tags)
        if found is None:
            found = self._by_scan(wanted)
        return found

    def exported(self, names: Collection[str]) -> dict[str, int]:
        """The addresses of those functions that the loader would find here.

        Most files have none of them, which the hash table's filter tells at once.
        """
        tags = self._tags()
        found: dict[str, int] = {}
        for name in self._likely(names, tags):
            wanted = name.encode()
            value = self._by_gnu_hash(wanted, tags, _STT_FUNC)
            if value is None:
                value = self._by_hash(wanted, tags, _STT_FUNC)
            if value is not None:
                found[name] = value
        return found

    def listed(self, names: Collection[str]) -> set[tuple[str, int]]:
        """Those functions in .symtab with their addresses, hidden and static ones too.

        Static functions of several sources may have the same name. A stripped file has no such table.
        """
        sections = self._sections()
        found: set[tuple[str, int]] = set()
        table = next((each for each in sections if each.kind == _SHT_SYMTAB), None)
        if table is None or table.link >= len(sections):
            return found
        places = self._places_of(names, sections[table.link])
        for part in self._parts(table) if places else ():
            whole = len(part) // _SYMBOL.size * _SYMBOL.size
            for text, info, _, section, value, _ in _SYMBOL.iter_unpack(part[:whole]):
                if text in places and info & 15 == _STT_FUNC and section:
                    found.add((places[text], value))
                    if len(found) > _MOST_FUNCTIONS:
                        raise ElfError("functions beyond reason")
        return found

    def section(self, name: str) -> Section | None:
        """The section of that name."""
        sections = self._sections()
        if self._names >= len(sections):
            return None
        names = self._table(sections[self._names])
        wanted = name.encode() + b"\0"
        return next((each for each in sections if names.startswith(wanted, each.name)), None)

    def section_content(self, name: str) -> bytes:
        """What the file has of a section: b"" without it, or if it is larger than some MiB."""
        section = self.section(name)
        return self._table(section) if section else b""

    # ---- tables

    def _read(self, offset: int, size: int, *, exactly: bool = True) -> bytes:
        if offset + size >= 1 << 63:
            raise ElfError("an offset beyond reason")
        data = self._file(offset, size)
        if exactly and len(data) != size:
            raise ElfError("cut short")
        return data

    def _sections(self) -> list[Section]:
        """All sections; none if they were stripped."""
        count = self._section_count
        if not self._sections_at or not count:
            return []
        if count > _MOST_SECTIONS or self._section_size != _SECTION.size:
            raise ElfError("sections beyond reason")
        table = self._read(self._sections_at, count * _SECTION.size)
        return [
            Section(name, kind, address, offset, size, link)
            for name, kind, _, address, offset, size, link, *_ in _SECTION.iter_unpack(table)
        ]

    def _table(self, section: Section) -> bytes:
        if section.kind == _SHT_NOBITS or section.size > _LARGEST_TABLE:
            return b""
        return self._read(section.offset, section.size)

    def _tags(self) -> _Tags:
        """The dynamic section: the values of each tag."""
        tags: _Tags = {}
        if self._dynamic:
            offset, size = self._dynamic
            size = min(size, _MOST_DYNAMIC * _DYNAMIC.size) // _DYNAMIC.size * _DYNAMIC.size
            for tag, value in _DYNAMIC.iter_unpack(self._read(offset, size)):
                tags.setdefault(tag, []).append(value)
        return tags

    def _text(self, address: int) -> str:
        return self.content(address, _LONGEST_NAME).partition(b"\0")[0].decode("utf-8", "replace")

    # ---- symbols

    def _dynamic_symbol(self, index: int, name: bytes, tags: _Tags, kind: int | None) -> int | None:
        """The value of the dynamic symbol with that index if it is defined and has that name and kind."""
        entry = self.content(tags[_DT_SYMTAB][0] + index * _SYMBOL.size, _SYMBOL.size)
        if len(entry) != _SYMBOL.size:
            raise ElfError("a symbol beyond its table")
        text, info, _, section, value, _ = _SYMBOL.unpack(entry)
        if not section or (kind is not None and info & 15 != kind):
            return None
        if self.content(tags[_DT_STRTAB][0] + text, len(name) + 1) == name + b"\0":
            return int(value)
        return None

    def _by_gnu_hash(self, name: bytes, tags: _Tags, kind: int | None = None) -> int | None:
        if not {_DT_GNU_HASH, _DT_SYMTAB, _DT_STRTAB} <= tags.keys():
            return None
        table = tags[_DT_GNU_HASH][0]
        buckets, first, filter_words, _ = self._words(table, 4)
        if not buckets:
            return None
        value = gnu_hash(name)
        buckets_at = table + 16 + filter_words * 8
        (index,) = self._words(buckets_at + value % buckets * 4, 1)
        if index < first:
            return None
        hashes = self.content(buckets_at + buckets * 4 + (index - first) * 4, _LONGEST_CHAIN * 4)
        for place, (one,) in enumerate(struct.iter_unpack("<I", hashes[: len(hashes) // 4 * 4])):
            if one | 1 == value | 1:
                found = self._dynamic_symbol(index + place, name, tags, kind)
                if found is not None:
                    return found
            if one & 1:
                break
        return None

    def _by_hash(self, name: bytes, tags: _Tags, kind: int | None = None) -> int | None:
        if not {_DT_HASH, _DT_SYMTAB, _DT_STRTAB} <= tags.keys():
            return None
        table = tags[_DT_HASH][0]
        buckets, _ = self._words(table, 2)
        if not buckets:
            return None
        (index,) = self._words(table + 8 + sysv_hash(name) % buckets * 4, 1)
        for _ in range(_LONGEST_CHAIN):
            if not index:
                break
            found = self._dynamic_symbol(index, name, tags, kind)
            if found is not None:
                return found
            (index,) = self._words(table + 8 + buckets * 4 + index * 4, 1)
        return None

    def _likely(self, names: Collection[str], tags: _Tags) -> Collection[str]:
        """Those that the filter of the GNU hash table, if there is one, does not rule out."""
        if not {_DT_GNU_HASH, _DT_SYMTAB, _DT_STRTAB} <= tags.keys():
            return names
        table = tags[_DT_GNU_HASH][0]
        buckets, _, count, shift = self._words(table, 4)
        data = self.content(table + 16, count * 8) if 0 < count <= _LARGEST_TABLE // 8 else b""
        if not buckets or not data:
            return ()
        if len(data) != count * 8:
            raise ElfError("a hash table beyond the file")
        words = memoryview(data).cast("Q")

        def likely(value: int) -> bool:
            word = words[value // 64 % count]
            return bool(word >> value % 64 & word >> (value >> shift % 32) % 64 & 1)

        return [name for name in names if likely(gnu_hash(name.encode()))]

    def _places_of(self, names: Collection[str], table: Section) -> dict[int, str]:
        """Where in a table of names the wanted ones are, as the end of longer ones too."""
        wanted = {name.encode() + b"\0": name for name in names}
        if not wanted:
            return {}
        # Their beginnings are few, and rare in other names.
        begin = re.compile(b"|".join(sorted({re.escape(name[:_BEGINNING]) for name in wanted})))
        most = max(map(len, wanted))
        places: dict[int, str] = {}
        kept, offset = b"", 0  # the end of a part, where a name may begin that goes on in the next
        for part in self._parts(table):
            data = kept + part
            match = begin.search(data)
            while match:
                place = match.start()
                end = data.find(b"\0", place, place + most)
                name = wanted.get(data[place : end + 1])
                if name is not None:
                    places[offset + place] = name
                    if len(places) > _MOST_FUNCTIONS:
                        raise ElfError("names beyond reason")
                match = begin.search(data, place + 1)
            kept = data[-most:]
            offset += len(data) - len(kept)
        return places

    def _parts(self, section: Section) -> Iterator[bytes]:
        """A table, piece by piece; each but the last has whole symbols."""
        if section.size > _LARGEST_LISTING:
            raise ElfError("a table beyond reason")
        for place in range(0, section.size, _PART):
            size = min(_PART, section.size - place)
            yield self._read(section.offset + place, size)

    def _by_scan(self, name: bytes) -> int | None:
        """Through .symtab and .dynsym; `name` may be the end of a longer name in the table of names."""
        sections = self._sections()
        tables = [each for each in sections if each.kind in (_SHT_SYMTAB, _SHT_DYNSYM)]
        for table in tables[:2]:
            if table.link >= len(sections):
                continue
            symbols, names = self._table(table), self._table(sections[table.link])
            for text in _places(names, name + b"\0", _MOST_PLACES):
                for place in _places(symbols, struct.pack("<I", text), _MOST_ENTRIES):
                    if place % _SYMBOL.size or place + _SYMBOL.size > len(symbols):
                        continue
                    _, _, _, section, value, _ = _SYMBOL.unpack_from(symbols, place)
                    if section:
                        return int(value)
        return None

    def _words(self, address: int, count: int) -> tuple[int, ...]:
        data = self.content(address, count * 4)
        if len(data) != count * 4:
            raise ElfError("a hash table beyond the file")
        return struct.unpack(f"<{count}I", data)


def _places(data: bytes, wanted: bytes, most: int) -> Iterator[int]:
    place = data.find(wanted)
    while place >= 0 and most:
        yield place
        most -= 1
        place = data.find(wanted, place + 1)


@lru_cache(1024)
def gnu_hash(name: bytes) -> int:
    """The hash of DT_GNU_HASH: 5381 and times 33, modulo 2 to the 32."""
    value = 5381
    for byte in name:
        value = value * 33 + byte & 0xFFFFFFFF
    return value


def sysv_hash(name: bytes) -> int:
    """The hash of DT_HASH, from the gABI's chapter on dynamic linking."""
    value = 0
    for byte in name:
        value = (value << 4) + byte & 0xFFFFFFFF
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value
