import hashlib
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from tiebreak.backends import levels, platform
from tiebreak.backends.platform import cpu_features, cpu_name, describe, worker_count
from tiebreak.backends.provenance import commit, wheel

GIB = 2**30

X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 sse4_1 avx f16c fma avx2 avx512f avx512bw avx512vl avx512_bf16 avx512_fp16 amx_bf16 amx_tile erms

processor\t: 1
model name\t: another
flags\t\t: fpu avx512dq
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes asimdhp sve bf16 i8mm
CPU part\t: 0xd40
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def memory(available_gib: float, total_gib: float = 64) -> dict[str, str]:
    kib = 2**20
    return {"proc/meminfo": f"MemTotal: {int(total_gib * kib)} kB\nMemAvailable: {int(available_gib * kib)} kB\nX: 1\n"}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """No level is set, whichever these tests run on."""
    for name in levels.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_affinity", lambda: 8)


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "name", "features"),
    [
        # Not erms, which changes no bits, and not avx512dq, which only the second processor has.
        ("x86_64", X86, "Intel(R) Xeon(R) Platinum 8480+",
         "amx_bf16 amx_tile avx avx2 avx512_bf16 avx512_fp16 avx512bw avx512f avx512vl f16c fma sse4_1"),
        ("aarch64", ARM, "aarch64", "asimd asimdhp bf16 sve"),
    ],
)  # fmt: skip
def test_a_cpu_is_its_model_and_what_changes_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, cpuinfo: str, name: str, features: str
) -> None:
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: machine)
    root = write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert platform.emulated(root) is None
    assert (cpu_name(root), cpu_features(root)) == (name, tuple(features.split()))


@pytest.mark.usefixtures("native")
def test_an_emulated_processor_is_never_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    root = write(tmp_path, {"proc/cpuinfo": X86})
    # What `-cpu a64fx` says of itself under QEMU 7.2: AT_HWCAP with SVE (bit 22), AT_HWCAP2 without bf16 (bit 14).
    pairs = {16: 0x415FFB, 26: 0, 6: 4096}
    (root / "proc/self").mkdir()
    (root / "proc/self/auxv").write_bytes(b"".join(struct.pack("<QQ", *pair) for pair in pairs.items()))
    assert cpu_features(root) == ("asimd", "asimdhp", "sve")
    assert cpu_name(root) == "aarch64 (emulated processor)"
    monkeypatch.setenv("QEMU_CPU", "a64fx")
    monkeypatch.setenv(platform.QEMU, "7.2.22")
    told = describe(root)
    assert told["cpu"] == "a64fx (emulated processor)"
    assert told["emulated"] == "instructions emulated by QEMU 7.2.22, as the architecture defines them"
    assert told["level"] == "aarch64-a64fx"


def test_system_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert cpu_name(tmp_path) == "arm"
    assert cpu_features(tmp_path) == ()
    assert worker_count(root=tmp_path) >= 1
    assert describe(tmp_path)["memory_gib"] > 0


@pytest.mark.usefixtures("native")
def test_the_description_is_of_this_process_and_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    level = levels.LEVELS[-1]
    for name, value in level.environment.items():
        monkeypatch.setenv(name, value)
    shown = describe()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["onednn_max_cpu_isa"] == level.environment["ONEDNN_MAX_CPU_ISA"]
    assert shown["level"] == level.name
    assert shown["cores"] == 3
    assert shown["torch"][0].isdigit()
    assert shown["aten_cpu_capability"]


def test_memory_is_the_containers(tmp_path: Path) -> None:
    limits = {"memory.max": str(4 * GIB), "memory.current": "0"}
    group = {"proc/self/cgroup": "0::/\n", **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()}}
    assert describe(write(tmp_path, memory(60) | group))["memory_gib"] == 4.0


def test_the_platform_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("CUDA was asked"))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    assert not {"gpu", "cuda"} & describe().keys()


@pytest.mark.usefixtures("eight_cores")
class TestWorkerCount:
    @pytest.mark.parametrize(("available", "each", "expected"), [(60, 2.0, 8), (9, 2.0, 4), (1, 2.0, 1), (60, 8.0, 7)])
    def test_memory_bounds_it(self, tmp_path: Path, available: float, each: float, expected: int) -> None:
        assert worker_count(each, root=write(tmp_path, memory(available))) == expected

    @pytest.mark.parametrize(
        ("group", "files", "expected"),
        [
            # Version 2: "quota period", or "max period".
            *(("0::/", {"cpu.max": f"{text}\n"}, cores) for text, cores in
              (("max 100000", 8), ("300000 100000", 3), ("150000 100000", 1), ("1000 100000", 1))),
            # A limit on an outer group.
            ("0::/user.slice/job.scope", {"user.slice/cpu.max": "200000 100000\n",
                                          "user.slice/job.scope/cpu.max": "max 100000\n"}, 2),
            # File cache is given back.
            ("0::/", {"memory.max": f"{10 * GIB}\n", "memory.current": f"{9 * GIB}\n",
                      "memory.stat": f"anon {4 * GIB}\ninactive_file {5 * GIB}\n"}, 3),
            ("0::/", {"memory.max": "max\n", "memory.current": f"{GIB}\n"}, 8),
            # Version 1. The path is the host's, not to be seen in the container; the mount itself is the container's.
            *(("5:cpu,cpuacct:/docker/0123\n3:cpuset:/docker/0123",
               {f"{mount}/cpu.cfs_quota_us": f"{quota}\n", f"{mount}/cpu.cfs_period_us": "100000\n"}, cores)
              for mount in ("cpu", "cpu,cpuacct") for quota, cores in ((-1, 8), (500000, 5))),
            *(("4:memory:/batch/job\n0::/",
               {"memory/batch/job/memory.limit_in_bytes": f"{limit}\n",
                "memory/batch/job/memory.usage_in_bytes": f"{2 * GIB}\n",
                "memory/batch/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n"}, cores)
              for limit, cores in ((9223372036854771712, 8), (7 * GIB, 3))),
        ],
    )  # fmt: skip
    def test_control_groups_bound_it(self, tmp_path: Path, group: str, files: dict[str, str], expected: int) -> None:
        limits = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        root = write(tmp_path, memory(60) | {"proc/self/cgroup": f"{group}\n"} | limits)
        assert worker_count(root=root) == expected


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git to ask")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit, and a tag that must not show."""
    git(tmp_path, "init", "-q")
    write(tmp_path, {"file": "old"})
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "one")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    return tmp_path


@needs_git
def test_commit_of_a_clean_and_a_modified_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(checkout / "elsewhere"))
    assert commit(checkout) == head
    write(checkout, {"file": "new"})
    assert commit(checkout) == f"{head}-dirty"


@needs_git
def test_no_commit_without_git_or_a_repository_of_its_own(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(checkout, {"inner/file": ""})
    assert commit(checkout / "inner") is None
    git(checkout / "inner", "init", "-q")
    assert commit(checkout / "inner") is None  # there is none yet
    monkeypatch.setenv("PATH", "")
    assert commit(checkout) is None


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of an installed wheel, version 3.1 of `made_up`."""
    module = tmp_path / "made_up/module.py"
    # As pip writes it: SHA-256 of the content, base64 for URLs, without padding.
    record = (
        "made_up/module.py,sha256=nia_NpkRxFwkPGhBR7I_yeHc_PJX0pmhxjIBam_NM_Q,6\nmade_up/__pycache__/module.pyc,,\n"
    )
    about = {"METADATA": "Name: made_up\nVersion: 3.1\n", "RECORD": record}
    write(tmp_path, {"made_up/module.py": "x = 1\n"})
    write(tmp_path, {f"made_up-3.1.dist-info/{name}": text for name, text in about.items()})
    monkeypatch.syspath_prepend(str(tmp_path))
    return module


def test_a_wheel_is_its_version_and_what_its_files_hold(installed: Path) -> None:
    name = wheel("made_up", installed)
    line = f"made_up/module.py {hashlib.sha256(installed.read_bytes()).hexdigest()}\n"
    assert name == f"3.1 sha256:{hashlib.sha256(line.encode()).hexdigest()}"
    installed.write_text("x = 2\n")
    edited = wheel("made_up", installed)
    assert edited is not None
    assert edited.endswith("-dirty")
    assert edited.removesuffix("-dirty") != name


def test_no_wheel_where_the_code_is_not_from_one(installed: Path) -> None:
    assert wheel("made_up", Path(__file__)) is None
    assert wheel("never_installed", installed) is None
