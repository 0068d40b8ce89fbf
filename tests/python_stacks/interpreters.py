"""Every CPython that the tests can have: this machine's own, and others that are made for them.

Debian's newest suite has 3.13, 3.14 and 3.15: unpacked into a folder, they run by chroot, which also gives
the tests another root and another libc. A free-threaded one and a static one with musl, of which there are
no packages, are compiled from Debian's source packages. All of that is kept in the cache and can be removed
at any time; what is there already needs no network.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.guests.image import locked
from tests.guests.packages import CACHE as GUESTS
from tests.guests.packages import KEYRING, Suite, mirror, unpack

CACHE = GUESTS.with_name("expanse-ebpf-pythons")
OLDEST, NEWEST = 8, 15
_DEBIAN = (13, 14, 15)
_PACKAGES = ("python3.{}-minimal", "libpython3.{}-minimal", "libpython3.{}-stdlib")
_LIBRARIES = ("libc6", "libgcc-s1", "zlib1g", "libexpat1", "libssl3t64", "libzstd1", "libffi8")
# The newest of which this machine's mirror has the source.
_FREE_THREADED = (("sid", "python3.14"), ("trixie", "python3.13"))
_UNUSED_S = 30 * 86400  # what no run has used for so long is thrown away
_MUSL = ("bookworm", "python3.11")
# A static interpreter has its extension modules built in; those that the tests' programs want.
_BUILT_IN = (
    *("array arraymodule.c", "_asyncio _asynciomodule.c", "_bisect _bisectmodule.c", "_json _json.c"),
    *("_contextvars _contextvarsmodule.c", "_datetime _datetimemodule.c", "_heapq _heapqmodule.c"),
    *("_opcode _opcode.c", "_pickle _pickle.c", "_posixsubprocess _posixsubprocess.c"),
    *("_queue _queuemodule.c", "_random _randommodule.c", "_socket socketmodule.c", "_struct _struct.c"),
    *("fcntl fcntlmodule.c", "math mathmodule.c", "select selectmodule.c"),
    *("unicodedata unicodedata.c", "_xxsubinterpreters _xxsubinterpretersmodule.c"),
)


@dataclass(frozen=True)
class Interp:
    """An interpreter that can be run."""

    name: str  # "3.14 debian", "3.13t source"
    command: tuple[str, ...]  # what comes before "-c", "-" or a file
    minor: int
    free_threaded: bool = False
    musl: bool = False
    root: Path | None = None  # the folder that is its "/"; None: this machine's

    def run(self, program: str, *arguments: str) -> list[str]:
        """The command that runs the text of a program, whose file is then called "<string>"."""
        return [*self.command, "-c", program, *arguments]

    @contextlib.contextmanager
    def file(self, program: str, folder: Path, name: str = "program.py") -> Generator[str]:
        """The text of a program as a file: its name as the interpreter sees it. In `folder` if it can be."""
        inside = Path(f"/tmp/test-{uuid.uuid4().hex}") if self.root else folder
        outside = Path(f"{self.root or ''}{inside}")
        outside.mkdir(parents=True, exist_ok=True)
        (outside / name).write_text(program, encoding="utf-8")
        try:
            yield str(inside / name)
        finally:
            if self.root:
                shutil.rmtree(outside)


Say = Callable[[str], None]


def names() -> list[str]:
    """What `interpreter` can give here; nothing is made to answer that."""
    return list(_makers())


def interpreters(say: Say = print) -> list[Interp]:
    """All of them, made as far as they have to be."""
    return [interpreter(name, say) for name in names()]


def interpreter(name: str, say: Say = print) -> Interp:
    """The one of that name; made at the first call, which may take minutes."""
    return _makers()[name](say)


@functools.cache
def _makers() -> dict[str, Callable[[Say], Interp]]:
    makers: dict[str, Callable[[Say], Interp]] = {}

    def there(name: str, python: Path, minor: int) -> None:
        makers[name] = lambda _say: Interp(name, (str(python),), minor)

    for folder in (Path.home() / ".pyenv/versions").glob("3.*"):
        minor = int(folder.name.split(".")[1])
        if OLDEST <= minor <= NEWEST:
            there(f"3.{minor} pyenv", folder / f"bin/python3.{minor}", minor)
    system = Path("/usr/bin/python3")
    if system.exists() and (match := re.fullmatch(r"python3\.(\d+)", system.resolve().name)):
        there(f"3.{match[1]} system", system, int(match[1]))
    for minor in _DEBIAN:
        makers[f"3.{minor} debian"] = functools.partial(_debian, minor)
    makers["free-threaded"] = _free_threaded
    makers["musl"] = _musl
    return dict(sorted(makers.items(), key=lambda item: int((re.findall(r"\.(\d+)", item[0]) or [99])[0])))


# ---- Debian's packages


def _debian(minor: int, say: Say) -> Interp:
    root = debian_root(say)
    return Interp(f"3.{minor} debian", ("chroot", str(root), f"/usr/bin/python3.{minor}"), minor, root=root)


@functools.cache
def debian_root(say: Say = print) -> Path:
    """A folder with the interpreters of Debian's newest suite and what they need."""
    packages = [name.format(minor) for minor in _DEBIAN for name in _PACKAGES] + list(_LIBRARIES)

    def make(folder: Path) -> None:
        _unpack(packages, folder)

    return _kept("debian", packages, make, say)


@functools.cache
def debian_headers(say: Say = print) -> Path:
    """A folder with their header files, /usr/include."""
    packages = [f"libpython3.{minor}-dev" for minor in _DEBIAN]

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            _unpack(packages, Path(scratch))
            shutil.copytree(f"{scratch}/usr/include", folder / "include")

    return _kept("headers", packages, make, say) / "include"


def _architecture() -> str:
    return subprocess.run(
        ["dpkg", "--print-architecture"], check=True, capture_output=True, text=True
    ).stdout.strip()


def _unpack(packages: Sequence[str], folder: Path) -> None:
    with locked():
        unpack(Suite("sid", _architecture()).fetch(packages, alone=True), folder)


# ---- what is compiled


def _free_threaded(say: Say) -> Interp:
    def make(folder: Path) -> None:
        for suite, package in _FREE_THREADED:
            try:
                source = _source(suite, package, folder / "source")
            except RuntimeError:
                say(f"pythons: no source package {package} of {suite} to be had")
                continue
            _compile(source, folder, ["--disable-gil"], say)
            return
        raise RuntimeError("none of the source packages of Python can be had")

    folder = _kept("free-threaded", [_FREE_THREADED, inspect.getsource(_compile)], make, say)
    minor = _minor(folder)
    return Interp(f"3.{minor}t source", (str(folder / "python"),), minor, free_threaded=True)


def _musl(say: Say) -> Interp:
    def make(folder: Path) -> None:
        source = _source(*_MUSL, folder / "source")
        # The kernel's headers, which musl does not bring, without those of the other libc beside them.
        include = folder / "source/include"
        include.mkdir()
        for name in ("linux", "asm-generic"):
            (include / name).symlink_to(f"/usr/include/{name}")
        (asm,) = Path("/usr/include").glob("*-linux-gnu/asm")
        (include / "asm").symlink_to(asm)
        compiler = folder / "source/cc"
        # configure takes the other libc's name for a contradiction.
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --print-multiarch ] && exit 0\nexec musl-gcc -idirafter {include} "$@"\n'
        )
        compiler.chmod(0o755)
        (source / "Modules/Setup.local").write_text("*static*\n" + "\n".join(_BUILT_IN) + "\n")
        options = [f"CC={compiler}", "LDFLAGS=-static", "LINKFORSHARED= "]
        _compile(source, folder, options, say, ["python", "pybuilddir.txt"])

    folder = _kept("musl", [_MUSL, _BUILT_IN, *map(inspect.getsource, (make, _compile))], make, say)
    minor = _minor(folder)
    return Interp(f"3.{minor} musl", (str(folder / "python"),), minor, musl=True)


def _minor(folder: Path) -> int:
    return int((folder / "minor").read_text())


def _source(suite: str, package: str, folder: Path) -> Path:
    """The unpacked upstream source of Debian's source package, in `folder`."""
    state = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "sources.list").write_text(f"deb-src [signed-by={KEYRING}] {mirror()} {suite} main\n")
    settings = {
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
        "Acquire::Check-Valid-Until": "false",
        "Acquire::Languages": "none",
        "Dir::Cache": state / "cache",
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": "/dev/null",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    for command in (["update"], ["--download-only", "source", package]):
        _call([*apt, *command], state)
    (archive,) = state.glob("*.orig.tar.?z")
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
    shutil.rmtree(state)
    (unpacked,) = folder.glob("Python-*")
    return unpacked


def _call(command: Sequence[str], folder: Path) -> None:
    """Run it there; RuntimeError with what it said if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _compile(
    source: Path, folder: Path, options: Sequence[str], say: Say, targets: Sequence[str] = ("all",)
) -> None:
    """Build in the source tree, then keep in `folder` what it takes to run from there."""
    common = ["--disable-test-modules", "--without-ensurepip", "--without-doc-strings"]
    # Little optimisation, since compiling is what takes the time; without asserts, as it is shipped.
    options = ["-q", *common, "OPT=-O1 -DNDEBUG -fwrapv", *options]
    say(f"pythons: configuring {source.name}")
    _call(["./configure", *options], source)
    command = ["make", f"-j{os.cpu_count()}", *targets]
    with subprocess.Popen(
        command, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as make:
        assert make.stdout
        log, told = [], 0.0
        for line in make.stdout:
            log.append(line)
            if time.monotonic() > told + 15:
                told = time.monotonic()
                say(f"pythons: compiling {source.name}, {sum(' -c ' in line for line in log)} files so far")
    if make.returncode:
        raise RuntimeError(f"{source.name} does not compile:\n{''.join(log[-30:])}")
    for name in ("python", "pybuilddir.txt"):
        shutil.copy(source / name, folder)
    unused = shutil.ignore_patterns("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo")
    shutil.copytree(source / "Lib", folder / "Lib", ignore=unused)
    shutil.copytree(source / "build", folder / "build", ignore=shutil.ignore_patterns("temp.*"))
    (folder / "minor").write_text(source.name.split(".")[1])


# ---- the cache


def _kept(kind: str, recipe: Sequence[object], make: Callable[[Path], None], say: Say) -> Path:
    """The folder in the cache that `make` fills, made anew when what `recipe` says has changed."""
    text = "\n".join(str(part) for part in recipe)
    kept = CACHE / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with open(CACHE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():  # nor has another run made it meanwhile
                _make(kept, make, say)
    os.utime(kept)
    return kept


def _make(kept: Path, make: Callable[[Path], None], say: Say) -> None:
    for unused in CACHE.glob("*-*"):
        if time.time() - unused.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(unused)
    say(f"pythons: making {kept.name}")
    making = CACHE / f".making-{kept.name}"
    if making.exists():
        shutil.rmtree(making)
    making.mkdir()
    make(making)
    shutil.rmtree(making / "source", ignore_errors=True)
    making.rename(kept)
