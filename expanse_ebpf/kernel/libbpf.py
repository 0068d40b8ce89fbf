"""A thin typed binding of libbpf.so.1: objects, maps, programs, links, ring buffers.

Only what the agent calls is here. Everything hangs on descriptors of this process and nothing is
pinned, so the kernel removes it all when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from expanse_ebpf.errors import UnavailableError

OBJECTS = Path(__file__).parent / "objects"

_MESSAGE_LIMIT = 4 << 20  # bytes of one message of libbpf's: a verifier's log can be long
_LOG_LIMIT = 64 * 1024  # characters of it that are kept: the last ones say what was wrong
_PRINT = ctypes.CFUNCTYPE(c_int, c_int, c_char_p, c_void_p)
_SAMPLE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)
_RUN_ON_CPU = 1  # BPF_F_TEST_RUN_ON_CPU
_STATS_RUN_TIME = 0  # BPF_STATS_RUN_TIME


class BpfError(UnavailableError):
    """libbpf or the kernel refused something; `errno` says how and `log` holds libbpf's last words."""

    def __init__(self, what: str, code: int, log: str = "") -> None:
        super().__init__(f"{what}: {os.strerror(code)} ({errno.errorcode.get(code, code)})")
        self.what = what
        self.errno = code
        self.log = log


class _RunOptions(ctypes.Structure):
    """struct bpf_test_run_opts."""

    _fields_ = [
        ("size", c_size_t),
        ("data_in", c_void_p),
        ("data_out", c_void_p),
        ("data_size_in", c_uint32),
        ("data_size_out", c_uint32),
        ("ctx_in", c_void_p),
        ("ctx_out", c_void_p),
        ("ctx_size_in", c_uint32),
        ("ctx_size_out", c_uint32),
        ("retval", c_uint32),
        ("repeat", c_int),
        ("duration", c_uint32),
        ("flags", c_uint32),
        ("cpu", c_uint32),
        ("batch_size", c_uint32),
    ]


class _UprobeOptions(ctypes.Structure):
    """struct bpf_uprobe_opts, up to what libbpf 1.1 has of it."""

    _fields_ = [
        ("size", c_size_t),
        ("ref_ctr_offset", c_size_t),
        ("bpf_cookie", c_uint64),
        ("retprobe", ctypes.c_bool),
        ("func_name", c_char_p),
    ]


class ProgramInfo(ctypes.Structure):
    """struct bpf_prog_info up to run_cnt (include/uapi/linux/bpf.h)."""

    _fields_ = [
        ("type", c_uint32),
        ("id", c_uint32),
        ("tag", c_char * 8),
        ("jited_prog_len", c_uint32),
        ("xlated_prog_len", c_uint32),
        ("jited_prog_insns", c_uint64),
        ("xlated_prog_insns", c_uint64),
        ("load_time", c_uint64),
        ("created_by_uid", c_uint32),
        ("nr_map_ids", c_uint32),
        ("map_ids", c_uint64),
        ("name", c_char * 16),
        ("ifindex", c_uint32),
        ("gpl_compatible", c_uint32),
        ("netns_dev", c_uint64),
        ("netns_ino", c_uint64),
        ("nr_jited_ksyms", c_uint32),
        ("nr_jited_func_lens", c_uint32),
        ("jited_ksyms", c_uint64),
        ("jited_func_lens", c_uint64),
        ("btf_id", c_uint32),
        ("func_info_rec_size", c_uint32),
        ("func_info", c_uint64),
        ("nr_func_info", c_uint32),
        ("nr_line_info", c_uint32),
        ("line_info", c_uint64),
        ("jited_line_info", c_uint64),
        ("nr_jited_line_info", c_uint32),
        ("line_info_rec_size", c_uint32),
        ("jited_line_info_rec_size", c_uint32),
        ("nr_prog_tags", c_uint32),
        ("prog_tags", c_uint64),
        ("run_time_ns", c_uint64),
        ("run_cnt", c_uint64),
    ]


# Result and argument types of each function used. A missing entry would let ctypes cut pointers to int.
_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "libbpf_set_print": (c_void_p, _PRINT),
    "libbpf_major_version": (c_uint32,),
    "libbpf_minor_version": (c_uint32,),
    "libbpf_find_vmlinux_btf_id": (c_int, c_char_p, c_int),
    "bpf_object__open_file": (c_void_p, c_char_p, c_void_p),
    "bpf_object__load": (c_int, c_void_p),
    "bpf_object__close": (None, c_void_p),
    "bpf_object__find_map_by_name": (c_void_p, c_void_p, c_char_p),
    "bpf_object__find_program_by_name": (c_void_p, c_void_p, c_char_p),
    "bpf_object__next_program": (c_void_p, c_void_p, c_void_p),
    "bpf_object__next_map": (c_void_p, c_void_p, c_void_p),
    "bpf_map__name": (c_char_p, c_void_p),
    "bpf_map__fd": (c_int, c_void_p),
    "bpf_map__reuse_fd": (c_int, c_void_p, c_int),
    "bpf_map__set_max_entries": (c_int, c_void_p, c_uint32),
    "bpf_map__initial_value": (c_void_p, c_void_p, POINTER(c_size_t)),
    "bpf_program__name": (c_char_p, c_void_p),
    "bpf_program__fd": (c_int, c_void_p),
    "bpf_program__attach": (c_void_p, c_void_p),
    "bpf_program__attach_uprobe_opts": (
        c_void_p,
        c_void_p,
        c_int,
        c_char_p,
        c_size_t,
        POINTER(_UprobeOptions),
    ),
    "bpf_program__set_expected_attach_type": (c_int, c_void_p, c_int),
    "bpf_link__destroy": (c_int, c_void_p),
    "bpf_link__fd": (c_int, c_void_p),
    "bpf_iter_create": (c_int, c_int),
    "bpf_map_update_elem": (c_int, c_int, c_void_p, c_void_p, c_uint64),
    "bpf_map_lookup_elem": (c_int, c_int, c_void_p, c_void_p),
    "bpf_map_delete_elem": (c_int, c_int, c_void_p),
    "bpf_prog_test_run_opts": (c_int, c_int, POINTER(_RunOptions)),
    "bpf_obj_get_info_by_fd": (c_int, c_int, c_void_p, POINTER(c_uint32)),
    "bpf_prog_get_fd_by_id": (c_int, c_uint32),
    "bpf_prog_query": (c_int, c_int, c_int, c_uint32, c_void_p, c_void_p, POINTER(c_uint32)),
    "bpf_enable_stats": (c_int, c_int),
    "ring_buffer__new": (c_void_p, c_int, _SAMPLE, c_void_p, c_void_p),
    "ring_buffer__epoll_fd": (c_int, c_void_p),
    "ring_buffer__consume": (c_int, c_void_p),
    "ring_buffer__free": (None, c_void_p),
}

_log: list[str] = []
_library: ctypes.CDLL | None = None
_keep: list[object] = []  # callbacks that C holds for ever


def library() -> ctypes.CDLL:
    """libbpf.so.1 with typed functions, loaded once; raises UnavailableError where it is not installed."""
    global _library
    if _library is None:
        try:
            loaded = ctypes.CDLL("libbpf.so.1", use_errno=True)
        except OSError:
            raise UnavailableError(
                "libbpf.so.1 is not installed: it loads the BPF programs (Debian: apt-get install libbpf1)"
            ) from None
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
        libc = ctypes.CDLL(None)
        # A va_list reaches a callback as a pointer on x86-64 and arm64 alike, so vsnprintf can take it back.
        libc.vsnprintf.argtypes = (c_char_p, c_size_t, c_char_p, c_void_p)

        def remember(level: int, form: bytes, arguments: int) -> int:
            if level <= 1:
                buffer = ctypes.create_string_buffer(_MESSAGE_LIMIT)
                libc.vsnprintf(buffer, len(buffer), form, arguments)
                _log.append(buffer.value[-_LOG_LIMIT:].decode(errors="replace"))
                del _log[:-50]
            return 0

        callback = _PRINT(remember)
        _keep.append(callback)
        loaded.libbpf_set_print(callback)
        _library = loaded
    return _library


def version() -> str:
    """The loaded libbpf's version, as "1.1"."""
    lib = library()
    return f"{lib.libbpf_major_version()}.{lib.libbpf_minor_version()}"


def _error(what: str, result: int = 0) -> BpfError:
    """The error behind a failed call: libbpf gives -errno or sets errno."""
    return BpfError(what, -result if result < 0 else ctypes.get_errno() or errno.EINVAL, "".join(_log))


class Map:
    """A BPF map of an object that has been loaded; its descriptor belongs to the object."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd

    def update(self, key: bytes | None, value: bytes) -> None:
        """Insert or overwrite; `key` None pushes on a queue."""
        result = library().bpf_map_update_elem(self.fd, key, value, 0)
        if result < 0:
            raise _error(f"update of map {self.name}", result)

    def lookup(self, key: bytes, size: int) -> bytes | None:
        """The value of `size` bytes at `key`; None where there is none."""
        value = ctypes.create_string_buffer(size)
        if library().bpf_map_lookup_elem(self.fd, key, value) < 0:
            return None
        return value.raw

    def delete(self, key: bytes) -> bool:
        """Whether `key` was there."""
        return bool(library().bpf_map_delete_elem(self.fd, key) == 0)

    def mapped(self, size: int) -> mmap.mmap:
        """The first `size` bytes of an mmap-able array, shared with the kernel."""
        length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        return mmap.mmap(self.fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


class Program:
    """A loaded program."""

    def __init__(self, name: str, pointer: int) -> None:
        self.name = name
        self._pointer = pointer
        self._link: int | None = None
        self.fd = library().bpf_program__fd(pointer)
        self._options = _RunOptions(size=ctypes.sizeof(_RunOptions))

    @property
    def attached(self) -> bool:
        """Whether the kernel runs it at its hook."""
        return self._link is not None

    def attach(self) -> None:
        """Attach at the hook that its section names."""
        if self._link is None:
            link = library().bpf_program__attach(self._pointer)
            if not link:
                raise _error(f"attaching BPF program {self.name}")
            self._link = link

    def probe(self, path: str, offset: int, cookie: int, pid: int = 0) -> int:
        """Run it when process `pid`, or any, comes to `offset` of a file; gives the link, for unlink()."""
        options = _UprobeOptions(size=ctypes.sizeof(_UprobeOptions), bpf_cookie=cookie)
        link = library().bpf_program__attach_uprobe_opts(
            self._pointer, pid or -1, path.encode(), offset, ctypes.byref(options)
        )
        if not link:
            raise _error(f"probing by BPF program {self.name}")
        return int(link)

    def detach(self) -> None:
        """Take it off its hook; safe when it is not on it."""
        if self._link is not None:
            library().bpf_link__destroy(self._link)
            self._link = None

    def iterate(self) -> None:
        """Run an attached iterator once over everything that it iterates over."""
        fd = library().bpf_iter_create(library().bpf_link__fd(self._link))
        if fd < 0:
            raise _error(f"iterating by BPF program {self.name}", fd)
        try:
            while os.read(fd, 4096):
                pass
        finally:
            os.close(fd)

    def run(self, cpu: int | None = None) -> None:
        """Run it once, on `cpu` or here; raises BpfError (ENXIO: that CPU is offline)."""
        self._options.flags = 0 if cpu is None else _RUN_ON_CPU
        self._options.cpu = cpu or 0
        result = library().bpf_prog_test_run_opts(self.fd, self._options)
        if result < 0:
            raise _error(f"running BPF program {self.name}", result)

    def statistics(self) -> tuple[int, int]:
        """(nanoseconds, runs) as counted by the kernel while run-time statistics were on."""
        info = ProgramInfo()
        size = c_uint32(ctypes.sizeof(info))
        result = library().bpf_obj_get_info_by_fd(self.fd, ctypes.byref(info), size)
        if result < 0:
            raise _error(f"statistics of BPF program {self.name}", result)
        return info.run_time_ns, info.run_cnt


class Object:
    """A BPF object file: opened, set up, loaded. Use as a context manager or call close()."""

    def __init__(self, name: str, folder: Path = OBJECTS) -> None:
        """Open `NAME.MACHINE.bpf.o` in `folder`; raises UnavailableError or BpfError."""
        self.name = name
        self._pointer: int | None = None
        self.maps: dict[str, Map] = {}
        self.programs: dict[str, Program] = {}
        path = folder / f"{name}.{os.uname().machine}.bpf.o"
        if not path.exists():
            raise UnavailableError(
                f"{path.name} is not installed: build it with `python bpf/build_hook.py` or install the wheel"
            )
        _log.clear()
        pointer = library().bpf_object__open_file(os.fsencode(path), None)
        if not pointer:
            raise _error(f"opening BPF object {name}")
        self._pointer = pointer

    def _find(self, name: str) -> int:
        found = library().bpf_object__find_map_by_name(self._pointer, name.encode())
        if not found:
            raise BpfError(f"BPF object {self.name} has no map {name}", errno.ENOENT)
        return int(found)

    def configure(self, values: ctypes.Structure) -> None:
        """Set the object's read-only data, which is one structure, before loading."""
        size = c_size_t()
        start = library().bpf_map__initial_value(self._find(".rodata"), size)
        if not start or size.value < ctypes.sizeof(values):
            raise BpfError(f"BPF object {self.name}: its configuration has another size", errno.EINVAL)
        ctypes.memmove(start, ctypes.byref(values), ctypes.sizeof(values))

    def share(self, other: Map) -> None:
        """Use `other`, of an object that is loaded, for the map of the same name here."""
        result = library().bpf_map__reuse_fd(self._find(other.name), other.fd)
        if result < 0:
            raise _error(f"sharing map {other.name}", result)

    def resize(self, name: str, entries: int) -> None:
        """Set a map's number of entries before loading."""
        result = library().bpf_map__set_max_entries(self._find(name), entries)
        if result < 0:
            raise _error(f"resizing map {name}", result)

    def expect(self, program: str, attach_type: int) -> None:
        """Say before loading how a program will be attached, where its section does not."""
        found = library().bpf_object__find_program_by_name(self._pointer, program.encode())
        if not found:
            raise BpfError(f"BPF object {self.name} has no program {program}", errno.ENOENT)
        result = library().bpf_program__set_expected_attach_type(found, attach_type)
        if result < 0:
            raise _error(f"setting up BPF program {program}", result)

    def load(self) -> None:
        """Have the kernel verify and load everything; raises BpfError with the verifier's words."""
        lib = library()
        result = lib.bpf_object__load(self._pointer)
        if result < 0:
            raise _error(f"loading BPF object {self.name}", result)
        pointer = lib.bpf_object__next_program(self._pointer, None)
        while pointer:
            name = lib.bpf_program__name(pointer).decode()
            self.programs[name] = Program(name, pointer)
            pointer = lib.bpf_object__next_program(self._pointer, pointer)
        pointer = lib.bpf_object__next_map(self._pointer, None)
        while pointer:
            name = lib.bpf_map__name(pointer).decode()
            self.maps[name] = Map(name, lib.bpf_map__fd(pointer))
            pointer = lib.bpf_object__next_map(self._pointer, pointer)

    def close(self) -> None:
        """Detach and unload everything; safe to call twice."""
        if self._pointer is not None:
            for program in self.programs.values():
                program.detach()
            library().bpf_object__close(self._pointer)
            self._pointer = None

    def __enter__(self) -> Object:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load_shrinking(make: Callable[[int], Object], attempts: int = 3) -> Object:
    """The object that `make(divisor)` sets up, loaded; short of memory, again with maps of half the size.

    `make` gets 1, 2, 4 … by which to divide the sizes of maps that may be smaller. Raises BpfError.
    """
    for attempt in range(attempts):
        made = make(1 << attempt)
        try:
            made.load()
        except BpfError as error:
            made.close()
            if error.errno != errno.ENOMEM or attempt == attempts - 1:
                raise
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise AssertionError("attempts is at least 1")


class RingBuffer:
    """Reader of a ring buffer map; `fd` becomes readable when there are records."""

    def __init__(self, source: Map, handle: Callable[[bytes], None], limit: int = 4096) -> None:
        """Each record is handed to `handle`, cut at `limit` bytes."""

        def sample(context: int, data: int, size: int) -> int:
            handle(ctypes.string_at(data, min(size, limit)))
            self._left -= 1
            return 0 if self._left else -errno.EAGAIN

        self._left = 0

        self._callback = _SAMPLE(sample)
        self._pointer = library().ring_buffer__new(source.fd, self._callback, None, None)
        if not self._pointer:
            raise _error(f"reading ring buffer {source.name}")
        self.fd = library().ring_buffer__epoll_fd(self._pointer)

    def consume(self, most: int = 0) -> int:
        """Hand over the records there are, or so many at most; returns their number.

        Without a limit that goes on for as long as others come in faster than they are handled.
        """
        self._left = most  # from 0 it does not come to 0 again
        count = library().ring_buffer__consume(self._pointer)
        if most and not self._left:
            return most
        if count < 0:
            raise _error("reading a ring buffer", count)
        return int(count)

    def close(self) -> None:
        """Stop reading; safe to call twice."""
        if self._pointer:
            library().ring_buffer__free(self._pointer)
            self._pointer = None


def unlink(link: int) -> None:
    """Take a probe away that Program.probe() has put in place."""
    library().bpf_link__destroy(link)


def enable_statistics() -> int:
    """Switch on the kernel's run-time statistics of BPF programs until the returned descriptor is closed."""
    fd = library().bpf_enable_stats(_STATS_RUN_TIME)
    if fd < 0:
        raise _error("switching on BPF run-time statistics", fd)
    return int(fd)
