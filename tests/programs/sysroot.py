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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiebreak.backends.platform import QEMU
from tiebreak.reports.errors import UsageError

_PINS = "{}.txt"  # of an architecture, beside this file
_DEB, _WHEEL = "deb", "wheel"  # kinds of pins
_DEBIAN_ARCHITECTURE = {"aarch64": "arm64"}
_SUITE = "bookworm"  # of Debian: its Python is 3.11, the oldest that the suite takes
_MIRROR = "http://deb.debian.org/debian"
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PYTHON = "usr/bin/python3.11"
_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
_ROOMS = ("backends", "cases", "kernels", "laboratory", "matrix", "programs", "reports")  # those of a wheel
_UNPACKED = 5  # times the size of what is downloaded
# What tools write of causes, before what they conclude from them: pip finds no version where the registry is silent.
_CAUSES = ("No space left", "connection broken by", "^E:", "^ERROR:")
_GET_QEMU = "apt-get install qemu-user-static (Debian, Ubuntu), dnf install qemu-user-static-aarch64 (Fedora)"


@dataclass(frozen=True)
class Pin:
    """One download."""

    kind: str  # deb or wheel
    name: str  # of the package
    version: str  # of it
    sha256: str  # of the file
    size: int  # of the file, in bytes


@dataclass(frozen=True)
class Emulator:
    """QEMU's user mode for one architecture."""

    path: str  # of the program
    version: str  # as it tells it


def pins(architecture: str) -> list[Pin]:
    """What is downloaded for an architecture."""
    text = Path(__file__).with_name(_PINS.format(architecture)).read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [Pin(kind, name, version, digest, int(size)) for kind, name, version, digest, size in lines]


def emulator(architecture: str) -> Emulator:
    """The QEMU on the PATH.

    Raises:
        UsageError: there is none.
    """
    names = [f"qemu-{architecture}-static", f"qemu-{architecture}"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise UsageError(f"no {' or '.join(names)} on the PATH: {_GET_QEMU}")
    told = re.search(r"version (\d+(?:\.\d+)*)", _output([path, "--version"]))
    return Emulator(path, told[1] if told else "of unknown version")


def python(architecture: str, sysroot: Path | None = None, tell: Callable[[str], object] = print) -> Path:
    """A program that is Python of another architecture, with PyTorch and this suite; what it lacks is downloaded first.

    Args:
        architecture: aarch64.
        sysroot: the root of an installed system of that architecture with Python 3.11, instead of Debian's packages.
        tell: takes a line on what is being done.

    Returns:
        A script that runs under QEMU what it is given, as `python` does. QEMU_CPU names the processor.

    Raises:
        UsageError: QEMU or a tool is missing, no room, a registry does not answer, a broken download.
    """
    qemu = emulator(architecture)
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
    """The folder with all these unpacked. It gets its name when it is whole: a stop leaves none that is half there."""
    kind = pinned[0].kind
    folder = home / f"{kind}s-{hashlib.sha256(''.join(pin.sha256 for pin in pinned).encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    downloads = home / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    size = sum(pin.size for pin in pinned)
    if shutil.disk_usage(home).free < (1 + _UNPACKED) * size:
        raise UsageError(f"{home}: not enough room: {_megabytes((1 + _UNPACKED) * size)} are needed")
    tell(f"{home}: {len(pinned)} {kind}s, {_megabytes(size)} to download, {_megabytes(_UNPACKED * size)} unpacked")
    files = []
    with tempfile.TemporaryDirectory(prefix="partial-", dir=home) as partial:
        if kind == _DEB:
            command, pinning = [*_apt(Path(partial, "apt"), _DEBIAN_ARCHITECTURE[architecture]), "download"], "="
        else:
            options = ("--quiet", "--no-deps", "--retries=1", "--timeout=20", *_for(architecture))
            command, pinning = [*_pip("download"), *options, "--dest=."], "=="
        for number, pin in enumerate(pinned, 1):
            tell(f"{number:3} of {len(pinned)}  {pin.name} {pin.version}  {_megabytes(pin.size)}")
            files.append(_fetched(pin, downloads, [*command, f"{pin.name}{pinning}{pin.version}"]))
        root = Path(partial, "root")
        root.mkdir()
        _unpack(kind, files, root, architecture)
        root.rename(folder)
    for file in files:
        shutil.rmtree(file.parent)
    return folder


def _fetched(pin: Pin, downloads: Path, command: Sequence[str]) -> Path:
    """The file of a pin, in a folder of its own, downloaded unless a run before this one has."""
    folder = downloads / pin.sha256[:16]
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(prefix="partial-", dir=downloads) as partial:
            into = Path(partial, "whole")
            into.mkdir()
            _output(command, into)
            (file,) = into.iterdir()
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if digest != pin.sha256:
                raise UsageError(f"{file.name}: broken: its SHA-256 is {digest}, not {pin.sha256}; try again")
            into.rename(folder)
    return next(folder.iterdir())


def _apt(state: Path, architecture: str) -> list[str]:
    """apt-get with lists and a cache of its own, which know nothing of this machine's packages; its index is renewed.

    Debian signs its index, and apt-get holds index and package to it.
    """
    if shutil.which("apt-get") is None or not _KEYS.exists():
        raise UsageError(f"no apt-get with {_KEYS} here: give --sysroot, the root of a system that has Python 3.11")
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()
    (state / "sources.list").write_text(f"deb [signed-by={_KEYS}] {_MIRROR} {_SUITE} main\n", encoding="utf-8")
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures::": architecture,
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
    return apt


def _pip(verb: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pip", verb, "--disable-pip-version-check")


def _for(architecture: str) -> list[str]:
    """What pip is told of another machine."""
    platforms = [f"--platform={tag}_{architecture}" for tag in _TAGS]
    return ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", *platforms]


def _unpack(kind: str, files: Sequence[Path], root: Path, architecture: str) -> None:
    if kind == _DEB:
        for file in files:
            _output(["dpkg", "-x", str(file), str(root)])
        return
    offline = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--root-user-action=ignore", f"--target={root}")
    _output([*_pip("install"), *offline, *_for(architecture), *map(str, files)])


def _launcher(home: Path, qemu: Emulator, root: Path, site: Path) -> Path:
    """Write what runs Python, and links to this tiebreak, whatever it is installed as, for that Python to import."""
    spec = importlib.util.find_spec("tiebreak")
    assert spec is not None
    assert spec.origin is not None
    init = Path(spec.origin).resolve()
    folder = home / f"suite-{hashlib.sha256(f'{init} {root} {qemu}'.encode()).hexdigest()[:12]}"
    script = folder / "python"
    if not script.exists():
        with tempfile.TemporaryDirectory(prefix="partial-", dir=home) as partial:
            whole = Path(partial, "whole")
            (whole / "tiebreak").mkdir(parents=True)
            (whole / "tiebreak" / init.name).symlink_to(init)
            for room in _ROOMS:
                found = importlib.util.find_spec(f"tiebreak.{room}")
                if found is not None and found.submodule_search_locations:
                    (whole / "tiebreak" / room).symlink_to(Path(found.submodule_search_locations[0]).resolve())
            distribution = importlib.metadata.distribution("tiebreak")
            metadata = f"tiebreak-{distribution.version}.dist-info"
            (whole / metadata).symlink_to(Path(str(distribution.locate_file(metadata))).resolve())
            environment = {
                "PYTHONHOME": root / "usr",
                "PYTHONPATH": f"{folder}{os.pathsep}{site}",
                "PYTHONDONTWRITEBYTECODE": "",  # an import of torch takes half a minute, with bytecode a quarter
                QEMU: qemu.version,
            }
            settings = (word for name, value in environment.items() for word in ("-E", f"{name}={value}"))
            command = shlex.join([qemu.path, "-L", str(root), *settings])
            # Python finds itself by the name it is called by: what it starts as sys.executable runs under QEMU too.
            text = f'#!/bin/sh\nexec {command} -0 {shlex.quote(str(script))} {shlex.quote(str(root / _PYTHON))} "$@"\n'
            (whole / script.name).write_text(text, encoding="utf-8")
            (whole / script.name).chmod(0o755)
            whole.rename(folder)
    return script


def _output(command: Sequence[str], folder: Path | None = None) -> str:
    """What a command prints.

    Raises:
        UsageError: it fails; with the line that names the cause, or the last that it wrote.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, errors="replace")
    except FileNotFoundError as error:
        raise UsageError(f"{command[0]} is not on the PATH") from error
    except subprocess.CalledProcessError as error:
        lines = [line.strip() for line in f"{error.stdout}\n{error.stderr}".splitlines() if line.strip()]
        causes = (line for cause in _CAUSES for line in lines if re.search(cause, line))
        tool = "pip" if "pip" in command else Path(command[0]).name
        why = next(causes, lines[-1] if lines else "no word of why")
        raise UsageError(f"{tool} failed: {why}") from error
    return done.stdout


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
