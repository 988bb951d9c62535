import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tiebreak.backends import levels as table
from tiebreak.backends.levels import EMULATED, LEVELS, VARIABLES, Level, current, supported
from tiebreak.programs import levels, sysroot
from tiebreak.programs.levels import main
from tiebreak.reports.errors import UsageError

AVX2 = {"avx", "avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


class Runner:
    """Stands in for the processes: notes each call, keeps records as pytest would, answers with scripted exit codes."""

    def __init__(self, statuses: Mapping[str, int | type[BaseException]] = {}, keep: bool = True) -> None:
        self.statuses = statuses
        self.keep = keep
        self.calls: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        self.calls.append((list(command), dict(environment)))
        name = command[3].removeprefix("--save=")
        status = self.statuses.get(name, 0)
        if not isinstance(status, int):
            raise status
        if self.keep and name != "compare" and status != 4:
            records = Path(command[4].removeprefix("--out=")) / f"{name}.json"
            records.parent.mkdir(exist_ok=True)
            records.write_text("{}")
        return status

    @property
    def ran(self) -> list[str]:
        return [command[3].removeprefix("--save=") for command, _ in self.calls]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A CPU with three levels, in an empty folder; their names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(levels, "cpu_features", lambda: ("avx2", "fma"))
    monkeypatch.setattr(table, "LEVELS", (LEVELS[0], Level("b", {VARIABLES[0]: "avx2"}), Level("c", {})))
    return ["native", "b", "c"]


def use(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> Runner:
    monkeypatch.setattr(levels, "_call", runner)
    return runner


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


def test_levels_differ_in_name_and_environment() -> None:
    assert len({level.name for level in LEVELS}) == len(LEVELS)
    assert len({tuple(sorted(level.environment.items())) for level in LEVELS}) == len(LEVELS)
    assert {name for level in LEVELS for name in level.environment} <= set(VARIABLES)
    assert len(set(LEVELS)) == len(LEVELS)


@pytest.mark.parametrize("level", [*LEVELS, *EMULATED["aarch64"]], ids=lambda level: level.name)
def test_the_level_in_force_is_recognised(level: Level) -> None:
    assert current({"PATH": "/bin", **level.environment}) == level.name


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"ATEN_CPU_CAPABILITY": "avx2"}, "custom"),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, "custom"),
        ({"DNNL_MAX_CPU_ISA": "AVX2"}, "custom"),
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "ANY"}, "custom"),
        ({"ATEN_CPU_CAPABILITY": "", "ONEDNN_MAX_CPU_ISA": ""}, "native"),
    ],
)
def test_other_environments(environment: dict[str, str], name: str) -> None:
    assert current(environment) == name


def test_run_starts_pytest_once_per_level_says_so_and_compares(
    three: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "SSE41")
    monkeypatch.setenv("KEPT", "yes")
    runner = use(monkeypatch, Runner())
    Path("mine").mkdir()
    assert main(["-n", "auto", "mine", "--out", "there"]) == 0
    assert runner.ran == [*three, "compare"]
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown] == [f"level {number} of 3" for number in (1, 2, 3)]
    assert "ATEN_CPU_CAPABILITY=avx2" in shown[1]
    for command, environment in runner.calls[:-1]:
        assert command[:3] == [sys.executable, "-m", "pytest"]
        assert command[5:] == ["-n", "auto", "mine"]
        assert environment["KEPT"] == "yes"
    settings = [{name: env[name] for name in VARIABLES if name in env} for _, env in runner.calls[:-1]]
    assert settings == [{}, {"ATEN_CPU_CAPABILITY": "avx2"}, {}]
    assert runner.calls[-1][0][1:] == [
        "-m",
        "tiebreak.reports.cli",
        "compare",
        *(f"there/{name}.json" for name in three),
    ]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"b": 1}, 1),
        ({"b": 5}, 1),
        ({"b": -11}, 1),
        ({"native": 1, "b": 2}, 2),
        ({"compare": 1}, 1),
        ({"compare": 2}, 2),
    ],
)
def test_a_failing_level_does_not_stop_the_others(
    three: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: dict[str, int],
    expected: int,
) -> None:
    runner = use(monkeypatch, Runner(statuses))
    assert main([]) == expected
    assert runner.ran == [*three, "compare"]
    error = capsys.readouterr().err
    assert all(f"(exit code {status})" in error for status in statuses.values())


def test_arguments_that_pytest_refuses_end_the_round(three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = use(monkeypatch, Runner({"native": 4}))
    assert main(["--no-such-option"]) == 2
    assert runner.ran == ["native"]


def test_a_level_without_records_fails(
    three: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    Path("out/b.json").write_text("kept by an earlier round")
    runner = use(monkeypatch, Runner(keep=False))
    assert main([]) == 1
    assert runner.ran == three
    assert "level b kept no records in out/b.json" in capsys.readouterr().err


def test_ctrl_c_stops_at_once(three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = use(monkeypatch, Runner({"b": KeyboardInterrupt}))
    assert main([]) == 130
    assert runner.ran == ["native", "b"]


def test_ctrl_c_lets_the_running_process_end_by_itself(tmp_path: Path) -> None:
    # Real processes in a group of their own, as a terminal has them: the signal goes to all of it.
    child = "import time\ntry:\n print('up', flush=True)\n time.sleep(60)\nexcept KeyboardInterrupt:\n print('tidied')"
    # A process that a shell has put into the background inherits a Ctrl-C that is ignored.
    parent = (
        "import os, signal, sys\nfrom tiebreak.programs.levels import _call\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n _call([sys.executable, '-c', sys.argv[1]], os.environ)\nexcept KeyboardInterrupt:\n sys.exit(130)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.read() == "tidied\n"
    assert process.returncode == 130


def test_list_shows_names_and_environments(three: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == three
    assert shown[1].split()[1:] == ["ATEN_CPU_CAPABILITY=avx2"]


def test_list_does_without_torch() -> None:
    code = "import sys\nfrom tiebreak.programs.levels import main\nmain(['--list'])\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--arch", "vax"], "aarch64"),
        (["--sysroot", "here"], "--arch"),
        (["--save=mine"], "--save"),
        (["--save", "mine"], "--save"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert named in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--level", "c,native"], ["native", "c"]),
        (["--arch", "aarch64", "--level", "max"], ["aarch64-max"]),
        (["--arch", "aarch64", "--level", "*-sve256,a64fx"], ["aarch64-max-sve256", "aarch64-a64fx"]),
    ],
)
def test_levels_are_named_the_highest_first(
    arguments: list[str], named: list[str], three: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == named


def test_an_unknown_processor_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"unknown level 'graviton'.*aarch64-neoverse-n1"):
        main(["--arch", "aarch64", "--level", "graviton"])


def test_what_goes_to_pytest_runs_the_cells_with_workers_unless_it_says_otherwise(
    three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = use(monkeypatch, Runner())
    assert main(["--level", "b", "--cases", "tied*", "--heads", "64"]) == 0
    assert runner.calls[0][0][5:] == ["-n", "auto", *levels.CELLS, "--cases", "tied*", "--heads", "64"]
    main(["--level", "b", "-n0"])
    assert runner.calls[1][0][5:] == [*levels.CELLS, "-n0"]


def test_an_emulated_level_runs_the_python_prepared_for_it(three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = use(monkeypatch, Runner())
    monkeypatch.setattr(sysroot, "python", lambda *asked: f"python of {asked}")
    assert main(["--arch", "aarch64", "--level", "a64fx", "--sysroot", "there"]) == 0
    ((command, environment),) = runner.calls
    assert command[0] == f"python of {('aarch64', Path('there'))}"
    assert environment["QEMU_CPU"] == "a64fx"
    assert current(environment) == "aarch64-a64fx"
