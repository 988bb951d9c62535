"""The types of the public names, as a type checker sees them in a user's file."""

import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import tiebreak
from tiebreak.backends.provenance import CHECKOUT
from tiebreak.kernels.external.options import KernelOptions
from tiebreak.matrix.options import FORWARDED, Option
from tiebreak.programs import pair
from tiebreak.programs.checking import CheckOptions

#: A user's file: each line with what the checker says of it.
LINES = {
    'verdict = tiebreak.check("my.py:attention", cases="tied*", heads=64)': "",
    "reveal_type(verdict)": "Verdict",
    "reveal_type(verdict.failed[0].reasons)": "tuple[str, ...]",
    'tiebreak.check("my.py:attention", head=64)': "error",
    'tiebreak.check("my.py:attention", no_worse_than="before")': "error",
    'reveal_type(tiebreak.pair("a.py:f", "b.py:f", dtype="fp16"))': "PairVerdict",
    'tiebreak.pair("a.py:f", "b.py:f", headz=1)': "error",
    'call = tiebreak.inputs("sink_tie", heads=64)': "",
    "reveal_type(call.exact)": "Tensor",
    'tiebreak.inputs("sink_tie", dtype="bf16")': "error",
    "tiebreak.assert_fair(call.exact, call.exact)": "",
    "tiebreak.assert_fair(call.exact)": "error",
    'mark = tiebreak.kernel(layout="bnhd", head_dims=[64], backward="none")': "",
    "reveal_type(mark(len))": "def (typing.Sized) -> int",
    'tiebreak.kernel(layuot="bnhd")': "error",
    'tiebreak.kernel(multiple_of="64")': "error",
    "tiebreak.nothing": "error",
}


def test_a_checker_sees_real_types_in_a_users_file_and_wrong_keywords(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text("\n".join(["import tiebreak", *LINES]) + "\n")
    words = ["--config-file", str(CHECKOUT / "pyproject.toml"), "--no-error-summary", str(file)]
    command = [sys.executable, "-m", "mypy", *words]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    said = dict.fromkeys(LINES, "")
    for number, kind, text in re.findall(rf"^{re.escape(str(file))}:(\d+): (\w+): (.*)$", done.stdout, re.M):
        line = [*LINES][int(number) - 2]
        said[line] = "error" if kind == "error" else said[line] or text
    for line, expected in LINES.items():
        shown = re.search(r'Revealed type is "(.*)"', said[line])
        assert (shown[1].replace("builtins.", "") if shown else said[line]).endswith(expected or said[line]), line
        assert bool(said[line]) == bool(expected), f"{line}: {said[line]}"
    assert "Any" not in said["reveal_type(verdict)"]


def test_the_typed_options_are_those_of_the_command() -> None:
    typed = typing.get_type_hints(CheckOptions)
    assert set(typed) == set(FORWARDED)

    def expected(option: Option) -> object:
        if option.repeats:
            return list[str]
        if option.choices is not None:
            return typing.Literal[option.choices]
        return str if option.metavar else bool

    others = {"seed": int, "heads": int, "cell_timeout": float}
    assert typed == {name: others.get(name, expected(option)) for name, option in FORWARDED.items()}
    parsed = vars(pair._parser().parse_args(["a", "b"])).keys() - {"a", "b", "json", "markdown", "figure"}
    assert set(typing.get_type_hints(pair.PairOptions)) == parsed


def test_to_name_the_types_imports_no_torch_and_a_wheel_has_them() -> None:
    code = "import sys, tiebreak; assert tiebreak.__all__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
    stub = (CHECKOUT / "kernels" / "public" / "__init__.pyi").read_text(encoding="utf-8")
    assert sorted(re.findall(r"import \w+ as (\w+)", stub)) == sorted(tiebreak.__all__)
    data = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.setuptools.package-data]")[2]
    assert '"*" = ["py.typed", "*.pyi"]' in data
    assert (CHECKOUT / "kernels" / "public" / "py.typed").exists()


def test_a_wrong_word_of_the_decorator_is_one_line_when_it_runs() -> None:
    with pytest.raises(ValueError, match="unknown word 'layuot'"):
        tiebreak.kernel(layuot="bnhd")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        KernelOptions("bnhd")  # type: ignore[call-arg]
