"""Another architecture's Python and PyTorch, prepared once in the user's cache, to run under QEMU's user mode.

Debian's packages bring Python and the libraries under it, PyPI's wheels all else. `aarch64.txt` pins each to a digest.
Nothing is installed, and no root rights are needed.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiebreak.backends.platform import QEMU
from tiebreak.programs.processes import finished
from tiebreak.reports.errors import UsageError

_DEB, _WHEEL = "deb", "wheel"  # kinds of pins
_DEBIAN_ARCHITECTURE = {"aarch64": "arm64"}
_SUITE = "bookworm"  # of Debian: its Python is 3.11, the oldest that the suite takes
_MIRROR = "http://deb.debian.org/debian"
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PYTHON = "usr/bin/python3.11"
_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
_ROOMS = ("backends", "cases", "kernels", "laboratory", "matrix", "programs", "reports")  # those of a wheel
# The lines in which tools name causes, before their conclusions: pip finds no version where the registry is silent.
_CAUSES = ("No space left", "connection broken by", "^E:", "^ERROR:")
_GET_QEMU = "apt-get install qemu-user-static (Debian, Ubuntu), dnf install qemu-user-static-aarch64 (Fedora)"


@dataclass(frozen=True)
class Pin:
    """A file to download, and its digest."""

    kind: str  # deb or wheel
    name: str  # of the package
    version: str  # of it
    sha256: str  # of the file
    size: int  # of the file, in bytes


def pins(architecture: str) -> list[Pin]:
    """Return the pinned files of an architecture."""
    text = Path(__file__).with_name(f"{architecture}.txt").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [Pin(kind, name, version, digest, int(size)) for kind, name, version, digest, size in lines]


def python(architecture: str, sysroot: Path | None = None, tell: Callable[[str], object] = print) -> Path:
    """Return a script that runs Python of another architecture under QEMU, with PyTorch and this suite, like `python`.

    Missing files are downloaded first, with a line of progress through `tell`. `sysroot`: an installed system of that
    architecture with Python 3.11, instead of Debian's packages. QEMU_CPU names the processor.

    Raises:
        UsageError: QEMU or a tool is missing, no room, a registry does not answer, a broken download.
    """
    names = [f"qemu-{architecture}-static", f"qemu-{architecture}"]
    qemu = next(filter(None, map(shutil.which, names)), None)
    if qemu is None:
        raise UsageError(f"no {' or '.join(names)} on the PATH: {_GET_QEMU}")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiebreak" / architecture
    pinned = pins(architecture)
    try:
        if sysroot is None:
            sysroot = _prepared(home, architecture, [pin for pin in pinned if pin.kind == _DEB], tell)
        elif not (sysroot / _PYTHON).is_file():
            raise UsageError(f"--sysroot {sysroot}: no {_PYTHON} in it; name the root of an {architecture} system")
        site = _prepared(home, architecture, [pin for pin in pinned if pin.kind == _WHEEL], tell)
        return _launcher(home, qemu, sysroot.resolve(), site)
    except OSError as error:
        raise UsageError(f"{error.filename or home}: {error.strerror or error}") from error


def _prepared(home: Path, architecture: str, pinned: Sequence[Pin], tell: Callable[[str], object]) -> Path:
    """Return the folder with all these unpacked. It gets its name when complete, so a stop leaves no partial one."""
    kind = pinned[0].kind
    folder = home / f"{kind}s-{hashlib.sha256(''.join(pin.sha256 for pin in pinned).encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        tell(f"{home}: {len(pinned)} {kind}s, {sum(pin.size for pin in pinned) / 1e6:.1f} MB to download")
        with tempfile.TemporaryDirectory(prefix="partial-", dir=home) as partial:
            root = Path(partial, "root")
            root.mkdir()
            (_unpack_debs if kind == _DEB else _unpack_wheels)(architecture, pinned, Path(partial), root)
            root.rename(folder)
    return folder


def _unpack_debs(architecture: str, pinned: Sequence[Pin], work: Path, root: Path) -> None:
    """Unpack by an apt-get with separate lists and cache, which know nothing of this machine's packages.

    Debian signs its index, and apt-get checks index and package against it.
    """
    if shutil.which("apt-get") is None or not _KEYS.exists():
        raise UsageError(f"no apt-get with {_KEYS} here: give --sysroot, the root of a system that has Python 3.11")
    state, debs = work / "apt", work / "debs"
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True)
    debs.mkdir()
    (state / "status").touch()
    (state / "sources.list").write_text(f"deb [signed-by={_KEYS}] {_MIRROR} {_SUITE} main\n", encoding="utf-8")
    settings = {
        "APT::Architecture": _DEBIAN_ARCHITECTURE[architecture],
        "APT::Architectures::": _DEBIAN_ARCHITECTURE[architecture],
        "APT::Sandbox::User": "root",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "20",
        "Dir::State": state,
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": "-",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    _output([*apt, "-oAPT::Update::Error-Mode=any", "update"])
    _output([*apt, "download", *(f"{pin.name}={pin.version}" for pin in pinned)], debs)
    files = {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in debs.iterdir()}
    for pin in pinned:
        if pin.sha256 not in files:
            raise UsageError(f"{pin.name} {pin.version}: broken: no download has the SHA-256 {pin.sha256}; try again")
        _output(["dpkg", "-x", str(files[pin.sha256]), str(root)])


def _unpack_wheels(architecture: str, pinned: Sequence[Pin], work: Path, root: Path) -> None:
    """Unpack by pip, which checks each digest, with downloads in a separate cache."""
    requirements = work / "requirements.txt"
    lines = (f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n" for pin in pinned)
    requirements.write_text("".join(lines), encoding="utf-8")
    machine = ["--implementation=cp", "--python-version=3.11", *(f"--platform={tag}_{architecture}" for tag in _TAGS)]
    usual = ["--quiet", "--disable-pip-version-check", "--retries=1", "--timeout=20", "--root-user-action=ignore"]
    alone = ["--no-deps", "--no-compile", "--require-hashes", "--only-binary=:all:", f"--target={root}"]
    _output([sys.executable, "-m", "pip", "install", *usual, *alone, *machine, f"--requirement={requirements}"])


def _launcher(home: Path, qemu: str, root: Path, site: Path) -> Path:
    """Write a script that runs Python, and links to this tiebreak, however installed, for that Python to import."""
    spec = importlib.util.find_spec("tiebreak")
    assert spec is not None
    assert spec.origin is not None
    init, release = Path(spec.origin).resolve(), re.search(r"version (\d+(?:\.\d+)*)", _output([qemu, "--version"]))
    version = release[1] if release else "of unknown version"
    modules = sorted(init.parent.glob("*.py"))  # the package itself, without its rooms
    folder = home / f"suite-{hashlib.sha256(f'{modules} {root} {qemu} {version}'.encode()).hexdigest()[:12]}"
    script = folder / "python"
    if script.exists():
        return script
    with tempfile.TemporaryDirectory(prefix="partial-", dir=home) as partial:
        whole = Path(partial, "whole")
        (whole / "tiebreak").mkdir(parents=True)
        for file in modules:
            (whole / "tiebreak" / file.name).symlink_to(file)
        for room in _ROOMS:
            spec_of_room = importlib.util.find_spec(f"tiebreak.{room}")
            if spec_of_room is not None and spec_of_room.submodule_search_locations:
                (whole / "tiebreak" / room).symlink_to(Path(spec_of_room.submodule_search_locations[0]).resolve())
        distribution = importlib.metadata.distribution("tiebreak")
        metadata = f"tiebreak-{distribution.version}.dist-info"
        (whole / metadata).symlink_to(Path(str(distribution.locate_file(metadata))).resolve())
        environment = {
            "PYTHONHOME": root / "usr",
            "PYTHONPATH": f"{folder}{os.pathsep}{site}",
            "PYTHONDONTWRITEBYTECODE": "",  # an import of torch takes half a minute, with bytecode a quarter
            QEMU: version,
        }
        settings = (word for name, value in environment.items() for word in ("-E", f"{name}={value}"))
        # Python finds itself by the name it is called by: what it starts as sys.executable runs under QEMU too.
        command = shlex.join([qemu, "-L", str(root), *settings, "-0", str(script), str(root / _PYTHON)])
        (whole / script.name).write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        (whole / script.name).chmod(0o755)
        whole.rename(folder)
    return script


def _output(command: Sequence[str], folder: Path | None = None) -> str:
    """Return the output of a command; UsageError: it fails, with the line that names the cause, or its last."""
    done = finished(command, folder=folder)
    if done.returncode:
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        causes = (line for cause in _CAUSES for line in lines if re.search(cause, line))
        tool = "pip" if "pip" in command else Path(command[0]).name
        why = next(causes, lines[-1] if lines else "no word of why")
        raise UsageError(f"{tool} failed: {why}")
    return done.stdout
