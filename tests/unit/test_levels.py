import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tiebreak.backends import levels as table
from tiebreak.backends.levels import EMULATED, LEVELS, VARIABLES, Level, current, supported
from tiebreak.backends.platform import cpu_features
from tiebreak.laboratory.levels import command as levels
from tiebreak.laboratory.levels import sysroot
from tiebreak.laboratory.levels.command import main
from tiebreak.programs.processes import CELLS, finished
from tiebreak.reports import cli
from tiebreak.reports.errors import UsageError

AVX2 = {"avx", "avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}
TESTS = Path(__file__).parents[1]
MARK = "processor"
#: Without bf16 instructions and with other vector code; without vector code, where the exponential is exact.
BESIDE = ("aten-avx2-onednn-avx512", "aten-default-onednn-avx2")


class Runner:
    """Stands in for the processes: notes each call, keeps records as pytest would, answers with scripted exit codes."""

    def __init__(self) -> None:
        self.statuses: Mapping[str, int | type[BaseException]] = {}
        self.keep = True
        self.calls: list[tuple[list[str], dict[str, str]]] = []

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, shown: bool
    ) -> subprocess.CompletedProcess[str]:
        assert shown
        self.calls.append((list(command), dict(environment or os.environ)))
        name = command[3].removeprefix("--save=")
        status = self.statuses.get(name, 0)
        if not isinstance(status, int):
            raise status
        if self.keep and name != "compare" and status != 4:
            records = Path(command[4].removeprefix("--out=")) / f"{name}.json"
            records.parent.mkdir(exist_ok=True)
            records.write_text("{}")
        return subprocess.CompletedProcess(command, status)

    @property
    def ran(self) -> list[str]:
        return [command[3].removeprefix("--save=") for command, _ in self.calls]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    """The processes of a CPU with three levels, native, b and c, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(levels, "cpu_features", lambda: ("avx2", "fma"))
    monkeypatch.setattr(table, "LEVELS", (LEVELS[0], Level("b", {VARIABLES[0]: "avx2"}), Level("c", {})))
    stand_in = Runner()
    monkeypatch.setattr(levels, "finished", stand_in)
    return stand_in


@pytest.mark.parametrize(
    ("features", "count"),
    [((), 1), ({"asimd", "sve", "bf16"}, 1), ({"avx", "sse4_1"}, 1), (AVX2, 2), (AVX512, 6), (AMX, 7)],
)
def test_a_cpu_has_the_levels_whose_features_it_has(features: set[str], count: int) -> None:
    levels = supported(features)
    assert len(levels) == count
    assert levels[0] == Level("native", {})
    # ATen runs what ATEN_CPU_CAPABILITY names without looking: avx512 on a CPU without it is an illegal instruction.
    asks = any(level.environment.get("ATEN_CPU_CAPABILITY") == "avx512" for level in levels)
    assert asks <= ("avx512f" in features)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        *((level.environment, level.name) for level in (*LEVELS, *EMULATED["aarch64"])),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, "custom"),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, "custom"),
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "ANY"}, "custom"),
        ({"ATEN_CPU_CAPABILITY": "", "ONEDNN_MAX_CPU_ISA": ""}, "native"),
    ],
)
def test_the_level_in_force_is_recognised(environment: Mapping[str, str], name: str) -> None:
    assert current({"PATH": "/bin", **environment}) == name
    assert environment.keys() <= set(VARIABLES)


@pytest.mark.parametrize("name", BESIDE)
def test_what_tells_most_of_a_processor_holds_at_another_level(name: str) -> None:
    """`make test LEVELS=all` runs all that computes, at each level."""
    level = {each.name: each for each in supported(cpu_features())}.get(name)
    if level is None:
        pytest.skip("this CPU can't be set to that level")
    files = [path for path in TESTS.rglob("test_*.py") if f"mark.{MARK}" in path.read_text(encoding="utf-8")]
    lean = [word for name in ("cacheprovider", "hypothesispytest", "benchmark") for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", *lean, "-m", MARK, *map(str, files)]
    done = finished(command, levels.environment(level), TESTS.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_run_starts_pytest_once_per_level_says_so_and_compares(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "SSE41")
    monkeypatch.setenv("KEPT", "yes")
    Path("mine").mkdir()
    assert main(["-n", "auto", "mine", "--out", "there"]) == 0
    assert runner.ran == ["native", "b", "c", "compare"]
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown] == [f"level {number} of 3" for number in (1, 2, 3)]
    assert "ATEN_CPU_CAPABILITY=avx2" in shown[1]
    for command, environment in runner.calls[:-1]:
        assert command[:3] == [sys.executable, "-m", "pytest"]
        assert command[5:] == ["-n", "auto", "mine"]
        assert environment["KEPT"] == "yes"
    settings = [{name: env[name] for name in VARIABLES if name in env} for _, env in runner.calls[:-1]]
    assert settings == [{}, {"ATEN_CPU_CAPABILITY": "avx2"}, {}]
    records = [f"there/{name}.json" for name in ("native", "b", "c")]
    assert runner.calls[-1][0][1:] == ["-m", "tiebreak.reports.cli", "compare", *records]


@pytest.mark.parametrize(
    ("statuses", "exit_code", "ran"),
    [
        ({"b": 1}, 1, ["native", "b", "c", "compare"]),
        ({"b": -11}, 1, ["native", "b", "c", "compare"]),
        ({"native": 1, "b": 2}, 2, ["native", "b", "c", "compare"]),
        ({"compare": 1}, 1, ["native", "b", "c", "compare"]),
        ({"compare": 2}, 2, ["native", "b", "c", "compare"]),
        ({"native": 4}, 2, ["native"]),  # what pytest refuses it would refuse again
        ({"b": KeyboardInterrupt}, 130, ["native", "b"]),
    ],
)
def test_what_a_failing_level_ends(
    runner: Runner, capsys: pytest.CaptureFixture[str],
    statuses: dict[str, int | type[BaseException]], exit_code: int, ran: list[str],
) -> None:  # fmt: skip
    runner.statuses = statuses
    assert cli.main(["levels"]) == exit_code
    assert runner.ran == ran
    error = capsys.readouterr().err
    assert all(f"(exit code {status})" in error for status in statuses.values() if isinstance(status, int))


def test_a_level_without_records_fails(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/b.json").write_text("kept by an earlier round")
    runner.keep = False
    assert main([]) == 1
    assert runner.ran == ["native", "b", "c"]
    assert "level b kept no records in out/b.json" in capsys.readouterr().err


def test_a_process_that_takes_too_long_is_ended_and_one_line() -> None:
    with pytest.raises(UsageError, match=r"^sleep 60: did not end in 0.1 s$"):
        finished(["sleep", "60"], seconds=0.1)


def test_ctrl_c_lets_the_running_process_end_by_itself() -> None:
    # Real processes in a group of their own, as a terminal has them: the signal goes to all of it.
    child = "import time\ntry:\n print('up', flush=True)\n time.sleep(60)\nexcept KeyboardInterrupt:\n print('tidied')"
    # A process that a shell has put into the background inherits a Ctrl-C that is ignored. The table needs no torch.
    parent = (
        "import signal, sys\nfrom tiebreak.laboratory.levels.command import finished, main\nmain(['--list'])\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n finished([sys.executable, '-c', sys.argv[1]], shown=True)\n"
        "except KeyboardInterrupt:\n sys.exit(1 if 'torch' in sys.modules else 130)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        assert "up\n" in iter(process.stdout.readline, "")
        os.killpg(process.pid, signal.SIGINT)
        assert "tidied\n" in process.stdout.read()
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        ([], [["native"], ["b", "ATEN_CPU_CAPABILITY=avx2"], ["c"]]),
        (["--level", "c,native"], [["native"], ["c"]]),
        (["--arch", "aarch64", "--level", "max"], [["aarch64-max", "QEMU_CPU=max"]]),
        (["--arch", "aarch64", "--level", "*-sve256,a64fx"],
         [["aarch64-max-sve256", "QEMU_CPU=max,sve-max-vq=2"], ["aarch64-a64fx", "QEMU_CPU=a64fx"]]),
    ],
)  # fmt: skip
def test_list_shows_names_and_environments_the_highest_first(
    runner: Runner, arguments: list[str], listed: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--list"]) == 0
    lines = (line.partition("(")[0].split() for line in capsys.readouterr().out.splitlines())
    assert list(lines) == listed
    assert runner.ran == []


def test_what_goes_to_pytest_runs_the_cells_with_workers_unless_it_says_otherwise(runner: Runner) -> None:
    assert main(["--level", "b", "--cases", "tied*", "--heads", "64"]) == 0
    assert runner.calls[0][0][5:] == ["-n", "auto", *CELLS, "--cases", "tied*", "--heads", "64"]
    main(["--level", "b", "-n0"])
    assert runner.calls[1][0][5:] == [*CELLS, "-n0"]


def test_an_emulated_level_runs_the_python_prepared_for_it(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysroot, "python", lambda *asked: f"python of {asked}")
    assert main(["--arch", "aarch64", "--level", "a64fx", "--sysroot", "there"]) == 0
    ((command, environment),) = runner.calls
    assert command[0] == f"python of {('aarch64', Path('there'))}"
    assert environment["QEMU_CPU"] == "a64fx"
    assert current(environment) == "aarch64-a64fx"
