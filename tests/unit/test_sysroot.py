"""What is prepared for another architecture, without QEMU and without a network: the tools are scripts."""

import hashlib
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from tiebreak.laboratory.levels import sysroot
from tiebreak.laboratory.levels.sysroot import Pin, pins
from tiebreak.reports.errors import UsageError


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
    written = (
        'case $word in --target=*) cp "$0" "${word#--target=}/torch.py";; --requirement=*) cp "${word#*=}" asked;;'
    )
    script(tools / "python", f"{note}\ncd {tmp_path}; for word; do {written} esac; done")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.executable", str(tools / "python"))
    monkeypatch.setattr(sysroot, "_KEYS", tools / "dpkg")  # any file
    library = hashlib.sha256(b"a C library").hexdigest()
    pinned = [Pin("deb", "libc6", "1", library, 11), Pin("wheel", "torch", "2", "0f" * 32, 7)]
    monkeypatch.setattr(sysroot, "pins", lambda architecture: pinned)
    return tmp_path / "cache" / "tiebreak" / "aarch64"


def python(root: Path | None = None) -> Path:
    return sysroot.python("aarch64", root, tell=lambda line: None)


def left_over(home: Path) -> list[str]:
    return [str(path) for path in home.rglob("partial-*")]


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
    with pytest.raises(UsageError, match="file/tiebreak/aarch64: Not a directory"):
        python()


def test_a_second_run_downloads_nothing_and_pip_holds_wheels_to_their_digests(home: Path, tmp_path: Path) -> None:
    first, calls = python(), (tmp_path / "calls").read_text()
    assert len(calls.splitlines()) == 3  # the index and the packages of Debian's; the wheels
    assert "--require-hashes" in calls
    assert (tmp_path / "asked").read_text() == f"torch==2 --hash=sha256:{'0f' * 32}\n"
    assert python() == first
    assert (tmp_path / "calls").read_text() == calls
    assert left_over(home) == []


def test_the_python_runs_under_qemu_with_this_suite(home: Path, tmp_path: Path) -> None:
    script(tmp_path / "tools" / "qemu-aarch64-static", 'test "$1" = --version && echo "version 8.0" || echo "$@"')
    program = python()
    words = subprocess.run([program, "-c", "a b"], capture_output=True, text=True, check=True).stdout.split()
    assert words[-5:-2] == [str(program), words[-4], "-c"]
    assert words[-4].endswith("/usr/bin/python3.11")
    assert "TIEBREAK_QEMU=8.0" in words
    assert (program.parent / "tiebreak" / "kernels" / "plans.py").is_file()
    assert (program.parent / "tiebreak" / "plugins.py").is_file()


@pytest.mark.parametrize(
    ("tool", "text", "message"),
    [
        ("apt-get", 'echo "W: no" >&2; echo "E: Failed to fetch http://x: timed out" >&2; exit 100', "Failed to fetch"),
        ("apt-get", 'case "$*" in *" download "*) printf half > libc6.deb;; esac', "libc6 1: broken"),
        ("python", 'echo "ERROR: Could not find a version" >&2; exit 1', "pip failed: ERROR: Could not find a version"),
        # As pip and dpkg write it: what they conclude comes last, or is all that begins with ERROR.
        ("python", 'echo "WARNING: Retrying after connection broken by a time-out" >&2; echo "ERROR: none" >&2; exit 1',
         "broken by a time-out"),
        ("dpkg", 'echo "tar: ./usr: No space left on device" >&2; echo "dpkg-deb: error: tar subprocess" >&2; exit 2',
         "tar: ./usr: No space left"),
        ("dpkg", "exit 1", "dpkg failed: no word of why"),
    ],
)  # fmt: skip
def test_what_fails_is_one_line_and_leaves_nothing_half_written(
    home: Path, tmp_path: Path, tool: str, text: str, message: str
) -> None:
    whole = (tmp_path / "tools" / tool).read_text().partition("\n")[2]
    script(tmp_path / "tools" / tool, text)
    with pytest.raises(UsageError, match=message) as raised:
        python()
    assert len(str(raised.value).splitlines()) == 1
    assert left_over(home) == []
    script(tmp_path / "tools" / tool, whole)
    assert python().is_file()


def test_without_qemu_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt-get install qemu-user-static"):
        python()


def test_a_root_of_the_users_own_takes_the_place_of_debians_packages(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no usr/bin/python3"):
        python(tmp_path / "theirs")
    (tmp_path / "theirs/usr/bin").mkdir(parents=True)
    (tmp_path / "theirs/usr/bin/python3.11").touch()
    assert f"{tmp_path}/theirs/usr/bin/python3.11" in python(tmp_path / "theirs").read_text()
    assert not list(home.glob("debs-*"))
