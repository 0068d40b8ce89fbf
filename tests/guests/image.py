"""What a guest boots from: its kernel, a small first stage, a root file system, and what the test brings.

Each is made once and kept in the cache under a name that says what it was made of, so a change of a
package, of a pinned wheel or of this file makes a new one. A guest never writes to any of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from tests.guests.packages import CACHE, Suite, unpack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Kernel series to the suite that has it.
KERNELS = {"5.10": "bullseye", "6.1": "bookworm", "6.12": "trixie", "newest": "sid"}
# One user land for all kernels: the oldest whose Python will do, since its systemd knows every cgroup mode.
USER_LAND = "bookworm"
PYTHON = "3.11"
PACKAGES = (
    # Essential packages, which nothing names as a need.
    *("base-files", "base-passwd", "bash", "coreutils", "dash", "findutils", "grep", "hostname", "libc-bin"),
    *("sed", "tar", "util-linux"),
    *("busybox-static", "dbus", "iproute2", "libbpf1", "libstdc++6", "mount", "passwd", "procps", "python3"),
    *("systemd", "systemd-sysv", "udev", "usr-is-merged"),
)
# What the kernels may have as modules and the first stage needs.
MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "ext4")
INSTALLED = "opt/expanse-ebpf"  # where the units of deploy/systemd expect it
_UNUSED_S = 30 * 86400  # what no run has used for so long is thrown away


# Debian's name of an architecture to what pip calls its wheels.
PLATFORMS = {
    "amd64": ("manylinux_2_28_x86_64", "manylinux2014_x86_64"),
    "arm64": ("manylinux_2_28_aarch64", "manylinux2014_aarch64"),
}


class Kernel(NamedTuple):
    """A kernel that can be booted."""

    release: str  # as uname -r gives it
    image: Path
    initramfs: Path


# ---- the cache


@contextlib.contextmanager
def locked() -> Generator[None, None, None]:
    """Have the cache to oneself."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:20]


def _kept(kind: str, parts: Sequence[object], make: Callable[[Path], None]) -> Path:
    """The folder in the cache that `make` fills, made anew when `parts` or this file have changed."""
    folder = CACHE / kind
    folder.mkdir(parents=True, exist_ok=True)
    recipe = [(HERE / name).read_text() for name in ("image.py", "packages.py", "first_stage.sh")]
    kept = folder / _digest(*recipe, sys.version_info[:2], *parts)
    if not kept.exists():
        print(f"guests: making {kind} {kept.name}", file=sys.stderr, flush=True)
        for unfinished in folder.glob(".making-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        # A name of its own: what a run that was killed has started may still write into the last one.
        making = Path(tempfile.mkdtemp(dir=folder, prefix=".making-"))
        making.chmod(0o755)
        make(making)
        making.rename(kept)
    os.utime(kept)
    return kept


def prune(unused_s: float = _UNUSED_S) -> None:
    """Throw away what no run has used for a long time."""
    with locked():
        for kind in ("kernel", "root"):
            for kept in (CACHE / kind).glob("*"):
                if time.time() - kept.stat().st_mtime > unused_s:
                    shutil.rmtree(kept)


# ---- the kernel and the first stage


@functools.cache
def kernel(series: str, architecture: str) -> Kernel:
    """Debian's newest kernel of a series in KERNELS."""
    with locked():
        suite = Suite(KERNELS[series], architecture)
        meta = f"linux-image-cloud-{architecture}"
        names = suite.needed_by(meta, r"linux-(image|binary|modules)-\d[^:]*")
        busybox = Suite(USER_LAND, architecture).fetch(["busybox-static"], alone=True)
        packages = suite.fetch(names, alone=True)

        def make(folder: Path) -> None:
            with tempfile.TemporaryDirectory() as scratch:
                tree = Path(scratch)
                unpack([*packages, *busybox], tree)
                (image,) = {*tree.glob("boot/vmlinu*"), *tree.glob("usr/lib/modules/*/vmlinu*")}
                (modules,) = tree.glob("usr/lib/modules/*")
                shutil.copy(image, folder / "image")
                (folder / "release").write_text(modules.name)
                _first_stage(modules, tree / "usr/bin/busybox", folder / "initramfs")

        kept = _kept("kernel", [file.name for file in (*packages, *busybox)], make)
    return Kernel((kept / "release").read_text(), kept / "image", kept / "initramfs")


def _first_stage(modules: Path, busybox: Path, output: Path) -> None:
    """An initramfs that loads what is needed to find the root file system."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for folder in ("bin", "dev", "proc", "sys", "modules", "root"):
            (tree / folder).mkdir()
        shutil.copy(busybox, tree / "bin/busybox")
        shutil.copy(HERE / "first_stage.sh", tree / "init")
        (tree / "init").chmod(0o755)
        for module in load_order(modules, MODULES):
            name = module_name(module)
            (tree / "modules" / f"{name}.ko").write_bytes(read_module(module))
            with open(tree / "modules/order", "a") as order:
                order.write(f"{name}.ko\n")
        names = sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))
        with open(output, "wb") as file:
            subprocess.run(
                ["cpio", "--quiet", "--create", "--format=newc", "--owner=0:0"],
                cwd=tree,
                input="\n".join(names).encode(),
                stdout=file,
                check=True,
            )


def module_name(path: Path) -> str:
    """As the kernel has it: "virtio_rng" for virtio-rng.ko.xz."""
    return path.name.split(".")[0].replace("-", "_")


def read_module(path: Path) -> bytes:
    """A module file's content, unpacked."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def load_order(modules: Path, wanted: Iterable[str]) -> list[Path]:
    """The files of `wanted` and of all that they need, each after what it needs.

    A name without a file is built into the kernel. Needs stand in a module's `.modinfo` section as
    "depends=a,b".
    """
    files = {module_name(path): path for path in modules.rglob("*.ko*")}
    order: list[Path] = []

    def add(name: str) -> None:
        path = files.get(name)
        if path is None or path in order:
            return
        found = re.search(rb"\0depends=([^\0]*)\0", read_module(path))
        for need in found[1].decode().split(",") if found else []:
            add(need.replace("-", "_"))
        order.append(path)

    for name in wanted:
        add(name)
    return order


# ---- the root file system


@functools.cache
def root(architecture: str, extra: tuple[str, ...] = ()) -> Path:
    """An ext4 image with Debian, Python and the packages that the project depends on; `extra` Debian ones."""
    with locked():
        packages = Suite(USER_LAND, architecture).fetch([*PACKAGES, *extra])
        requirements = runtime_requirements()

        def make(folder: Path) -> None:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                tree = Path(scratch)
                tree.chmod(0o755)
                unpack(packages, tree)
                _settle(tree)
                _install(tree, requirements, architecture)
                make_ext4(tree, folder / "root.ext4", spare_mib=512)

        names = [file.name for file in packages]
        return _kept("root", [architecture, *names, requirements], make) / "root.ext4"


def _settle(tree: Path) -> None:
    """What the packages' own scripts would have done, as far as a guest needs it."""
    etc = tree / "etc"
    for name in ("passwd", "group"):
        shutil.copy(tree / f"usr/share/base-passwd/{name}.master", etc / name)
    with open(etc / "passwd", "a") as users, open(etc / "group", "a") as groups:
        users.write("messagebus:x:100:100::/nonexistent:/usr/sbin/nologin\n")
        users.write("user:x:1000:1000::/tmp:/bin/sh\n")
        groups.write("messagebus:x:100:\nuser:x:1000:\n")
    (etc / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    (etc / "hostname").write_text("guest\n")
    (etc / "hosts").write_text("127.0.0.1 localhost guest\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    awk = tree / "usr/bin/awk"
    if not awk.exists():
        awk.symlink_to("mawk")
    units = etc / "systemd/system"
    for name in ("payload", "out", "scratch"):
        (tree / name).mkdir()
    (units / "serial-getty@.service").symlink_to("/dev/null")
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "guest-command.service").write_text(
        "[Unit]\nAfter=multi-user.target\n"
        "[Service]\nType=oneshot\nExecStart=/payload/run\nTimeoutStartSec=infinity\n"
    )
    (units / "default.target.wants").mkdir(exist_ok=True)
    (units / "default.target.wants/guest-command.service").symlink_to("../guest-command.service")


def runtime_requirements() -> str:
    """The part of requirements.txt, pins and hashes, that the installed product needs."""
    needed: set[str] = set()
    waiting = ["expanse-ebpf"]
    while waiting:
        name = _normalised(waiting.pop())
        if name in needed:
            continue
        needed.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    blocks = re.findall(r"^[A-Za-z0-9][^\n]*==(?:[^\n]*\\\n)*[^\n]*", text, re.MULTILINE)
    return "\n".join(block for block in blocks if _normalised(block.split("==")[0]) in needed) + "\n"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _install(tree: Path, requirements: str, architecture: str) -> None:
    """A virtual environment as an administrator would make it, without running anything of the guest's."""
    home = tree / INSTALLED
    packages = home / f"lib/python{PYTHON}/site-packages"
    packages.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin/python3").symlink_to("/usr/bin/python3")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (packages / "payload.pth").write_text("/payload/site\n")
    listing = tree / "requirements.txt"
    listing.write_text(requirements)
    platforms = [f"--platform={name}" for name in PLATFORMS[architecture]]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-qq", "--target", packages, "--no-compile"),
            *(*platforms, "--implementation=cp", f"--python-version={PYTHON}", "--only-binary=:all:"),
            *("--no-deps", "--require-hashes", "-r", listing),
        ],
        check=True,
    )
    listing.unlink()
    for name in ("expanse-ebpf", "expanse-controller"):
        script = home / "bin" / name
        module = name.replace("-", "_")
        script.write_text(
            f"#!/{INSTALLED}/bin/python3\nimport sys\nfrom {module}.cli import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)
    compile_python(tree / f"usr/lib/python{PYTHON}")
    compile_python(packages)


def compile_python(folder: Path) -> None:
    """Bytecode for the guest, which is slow to make it; of no use to it if our Python is another version."""
    subprocess.run(
        [sys.executable, "-m", "compileall", "-qq", "-j2", "--invalidation-mode", "unchecked-hash", folder],
        check=False,  # some packages have templates with the suffix .py
    )


def make_ext4(tree: Path, output: Path, spare_mib: int) -> None:
    """An ext4 file system with the files of `tree` and so much room; owners are kept."""
    used = sum(path.lstat().st_size + 4096 for path in tree.rglob("*"))
    size_mib = used * 11 // 10 // 2**20 + spare_mib + 8
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", tree, output, f"{size_mib}M"],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
    )


# ---- what the test brings


def payload(wheel: Path, files: Iterable[Path], command: Sequence[str], folder: Path) -> Path:
    """An image with the project's wheel unpacked, `files` (below /payload/files), and the command to run."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tree = Path(scratch)
        tree.chmod(0o755)
        shutil.unpack_archive(wheel, tree / "site", "zip")
        (tree / "files").mkdir()
        for file in files:
            target = tree / "files" / file.name
            if file.is_dir():
                shutil.copytree(file, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(file, target)
        compile_python(tree)
        (tree / "command").write_text(f"exec {shlex.join(command)}\n")
        shutil.copy(HERE / "second_stage.sh", tree / "run")
        (tree / "run").chmod(0o755)
        for path in tree.rglob("*"):
            path.chmod(path.stat().st_mode | 0o444 | (0o111 if path.is_dir() else 0))
        make_ext4(tree, folder / "payload.ext4", spare_mib=1)
    return folder / "payload.ext4"


def build_wheel(folder: Path) -> Path:
    """The project's wheel, built from the working tree."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel
