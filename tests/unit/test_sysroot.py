"""What is prepared for another architecture, without QEMU and without a network: the tools are scripts."""

import hashlib
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiebreak.programs import sysroot
from tiebreak.programs.sysroot import Pin, pins
from tiebreak.reports.errors import UsageError

CONTENT = {"libc6": b"a C library", "torch": b"a wheel"}


def script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose apt-get and pip write files of one line, and note that they were called; its cache."""
    tools = tmp_path / "tools"
    script(tools / "qemu-aarch64-static", 'echo "qemu-aarch64 version 7.2.22 (Debian)"')
    note = f'echo "$@" >> {tmp_path}/calls'
    script(tools / "apt-get", f'{note}\ncase "$*" in *" download "*) printf "a C library" > libc6.deb;; esac')
    script(tools / "dpkg", 'mkdir -p "$3/usr/bin"; cp "$2" "$3/usr/bin/python3.11"')
    pip = 'for word; do case $word in --target=*) cp "$0" "${word#--target=}/torch.py";; esac; done'
    script(tools / "python", f'{note}\ncase "$*" in *" download "*) printf "a wheel" > torch.whl;; *) {pip};; esac')
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.executable", str(tools / "python"))
    monkeypatch.setattr(sysroot, "_KEYS", tools / "dpkg")  # any file
    pinned = [
        Pin(kind, name, "1", hashlib.sha256(CONTENT[name]).hexdigest(), len(CONTENT[name]))
        for kind, name in (("deb", "libc6"), ("wheel", "torch"))
    ]
    monkeypatch.setattr(sysroot, "pins", lambda architecture: pinned)
    return tmp_path / "cache" / "tiebreak" / "aarch64"


@pytest.fixture
def calls(home: Path, tmp_path: Path) -> Callable[[], int]:
    """How often a registry was asked."""
    file = tmp_path / "calls"
    return lambda: len(file.read_text().splitlines()) if file.exists() else 0


def left_over(home: Path) -> list[str]:
    return [str(path) for path in home.rglob("partial-*")]


def quietly(line: str) -> None:
    del line


def test_pins_name_each_download_once_with_its_digest() -> None:
    pinned = pins("aarch64")
    assert len({pin.name for pin in pinned}) == len(pinned)
    assert {pin.kind for pin in pinned} == {"deb", "wheel"}
    assert all(len(bytes.fromhex(pin.sha256)) == 32 and pin.size > 0 for pin in pinned)
    assert ("torch", "2.9.1") in {(pin.name, pin.version) for pin in pinned}


def test_every_room_is_linked() -> None:
    packages = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["tool"]["setuptools"]
    assert {f"tiebreak.{room}" for room in sysroot._ROOMS} == packages["package-dir"].keys() - {
        "tiebreak", "tiebreak.defects", "tiebreak.studies",
    }  # fmt: skip


def test_a_cache_that_is_no_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="file/tiebreak/aarch64/downloads: Not a directory"):
        sysroot.python("aarch64", tell=quietly)


def test_a_second_run_downloads_nothing(home: Path, calls: Callable[[], int]) -> None:
    first = sysroot.python("aarch64", tell=quietly)
    asked = calls()
    assert asked == 4  # the index and a package of Debian's; pip downloads, and unpacks
    assert sysroot.python("aarch64", tell=quietly) == first
    assert calls() == asked
    assert left_over(home) == []


def test_the_python_runs_under_qemu_with_this_suite(home: Path, tmp_path: Path) -> None:
    script(tmp_path / "tools" / "qemu-aarch64-static", 'test "$1" = --version && echo "version 8.0" || echo "$@"')
    python = sysroot.python("aarch64", tell=quietly)
    words = subprocess.run([python, "-c", "a b"], capture_output=True, text=True, check=True).stdout.split()
    assert words[-5:-2] == [str(python), words[-4], "-c"]
    assert words[-4].endswith("/usr/bin/python3.11")
    assert "TIEBREAK_QEMU=8.0" in words
    assert (python.parent / "tiebreak" / "kernels" / "plans.py").is_file()


@pytest.mark.parametrize(
    ("tool", "text", "message"),
    [
        ("apt-get", 'echo "W: no" >&2; echo "E: Failed to fetch http://x: timed out" >&2; exit 100', "Failed to fetch"),
        ("apt-get", 'case "$*" in *" download "*) printf half > libc6.deb;; esac', "libc6.deb: broken"),
        ("python", 'case "$*" in *" download "*) printf half > torch.whl;; esac', "torch.whl: broken"),
        ("python", 'echo "ERROR: Could not find a version" >&2; exit 1', "pip failed: ERROR: Could not find a version"),
        # As pip and dpkg write it: what they conclude comes last, or is all that begins with ERROR.
        (
            "python",
            'echo "WARNING: Retrying after connection broken by a time-out" >&2; echo "ERROR: none" >&2; exit 1',
            "broken by a time-out",
        ),
        (
            "dpkg",
            'echo "tar: ./usr: No space left on device" >&2; echo "dpkg-deb: error: tar subprocess" >&2; exit 2',
            "tar: ./usr: No space left",
        ),
    ],
)
def test_what_fails_is_one_line_and_leaves_nothing_half_written(
    home: Path, tmp_path: Path, tool: str, text: str, message: str
) -> None:
    whole = (tmp_path / "tools" / tool).read_text().partition("\n")[2]
    script(tmp_path / "tools" / tool, text)
    with pytest.raises(UsageError, match=message) as raised:
        sysroot.python("aarch64", tell=quietly)
    assert len(str(raised.value).splitlines()) == 1
    assert left_over(home) == []
    script(tmp_path / "tools" / tool, whole)
    assert sysroot.python("aarch64", tell=quietly).is_file()  # what is whole is kept, and the rest fetched


def test_what_a_stopped_run_has_downloaded_is_not_downloaded_again(
    home: Path, tmp_path: Path, calls: Callable[[], int]
) -> None:
    whole = (tmp_path / "tools" / "dpkg").read_text().partition("\n")[2]
    script(tmp_path / "tools" / "dpkg", "exit 1")
    with pytest.raises(UsageError, match="dpkg failed: no word of why"):
        sysroot.python("aarch64", tell=quietly)
    script(tmp_path / "tools" / "dpkg", whole)
    before = calls()
    sysroot.python("aarch64", tell=quietly)
    assert calls() - before == 3  # the index; pip's two


def test_a_folder_that_is_full_is_refused_before_anything_is_downloaded(
    home: Path, calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(UsageError, match="not enough room"):
        sysroot.python("aarch64", tell=quietly)
    assert calls() == 0


def test_without_qemu_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt-get install qemu-user-static"):
        sysroot.python("aarch64")


def test_a_root_of_the_users_own_takes_the_place_of_debians_packages(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no usr/bin/python3"):
        sysroot.python("aarch64", tmp_path / "theirs", quietly)
    (tmp_path / "theirs/usr/bin").mkdir(parents=True)
    (tmp_path / "theirs/usr/bin/python3.11").touch()
    text = sysroot.python("aarch64", tmp_path / "theirs", quietly).read_text()
    assert f"{tmp_path}/theirs/usr/bin/python3.11" in text
    assert not list(home.glob("debs-*"))
