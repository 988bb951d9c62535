"""The real torch-npu 2.13.0, without an NPU: what the backend calls is there, and takes and returns what it expects.

The package loads where CANN's libraries are found. Stand-ins for them are compiled from the symbols that the package
asks for and nobody has; they do nothing, so no NPU is found. They live in the temporary folder of the session.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tiebreak.backends.backend import CPU
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.npu import LAYOUTS, every_fusion_attention, npu_kernels

VERSION = "2.13.0"
OF_CANN = ("libascendcl", "libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
_OURS = Path(__file__).with_name("against_torch_npu.py")


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1]


def install(folder: Path) -> str | None:
    """None, or why torch-npu can't be had. torch is this environment's, unless it was built for other devices."""
    if not metadata.version("torch").startswith(VERSION):
        return f"torch-npu {VERSION} is built for torch {VERSION}, this is {torch.__version__}"
    tools = [tool for tool in ("cc", "nm") if shutil.which(tool) is None]
    if tools:
        return f"no {' and no '.join(tools)} to make stand-ins for CANN's libraries with"
    packages = [[f"torch-npu=={VERSION}"]]
    if torch.version.cuda is not None or torch.version.hip is not None:  # torch-npu refuses such a build
        packages.append([f"torch=={VERSION}+cpu", "--index-url", "https://download.pytorch.org/whl/cpu"])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:"]
    patience = ["--retries", "0", "--timeout", "20"]
    for package in packages:
        command = [*pip, *patience, "--target", str(folder), *package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{package[0]} can't be had: {_last(done.stderr)}"
    return None


def compile_stand_ins(symbols: list[str], folder: Path) -> None:
    """One library that returns 0 from every function, under the names of CANN's."""
    folder.mkdir()
    source, library = folder / "stand_in.c", folder / "stand_in.so"
    source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols))
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    for name in OF_CANN:
        (folder / f"{name}.so").symlink_to(library)


def ask(subject: str, site: Path, cann: Path, root: Path) -> dict[str, Any]:
    """Run our side against the package in a process of its own."""
    changed = {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": str(cann), "OMP_NUM_THREADS": "1"}
    # As on a user's machine: the suite itself has to keep torch from loading the package.
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    command = [sys.executable, str(_OURS), subject, str(root)]
    done = subprocess.run(command, env=environment | changed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(_last(done.stdout))
    return answer


def prepare(folder: Path) -> dict[str, Any]:
    """Install, compile, ask: all that the tests look at, or why there is nothing to look at."""
    site, cann, root = folder / "site", folder / "cann", folder / "root"
    (root / "dev").mkdir(parents=True)
    (root / "dev/davinci_manager").touch()  # a driver, so that the package is looked at at all
    try:
        if (reason := install(site)) is not None:
            return {"skip": reason}
        without = ask("symbols", site, folder / "none", root)
        compile_stand_ins(without["symbols"], cann)
        return {"without": without, "all": ask("all", site, cann, root)}
    finally:
        shutil.rmtree(site, ignore_errors=True)  # pytest keeps the folders of three sessions


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, Any]:
    """What the real package answers; asked once, whatever the number of workers."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder if worker_id == "master" else folder.parent) / "torch_npu"
    with FileLock(f"{folder}.lock"):
        answers = folder / "answers.json"
        if not answers.exists():
            folder.mkdir()
            answers.write_text(json.dumps(prepare(folder)))
    read: dict[str, Any] = json.loads(answers.read_text())
    if "skip" in read:
        pytest.skip(read["skip"])
    return read


def test_the_stand_ins_stand_in_for_cann_alone(answers: dict[str, Any]) -> None:
    symbols = answers["without"]["symbols"]
    assert 50 < len(symbols) < 200
    assert {"aclInit", "aclrtGetDeviceCount", "aclrtMalloc"} <= set(symbols)
    assert all(symbol.startswith(("acl", "Msprof", "rt")) for symbol in symbols)
    assert answers["without"]["missing"] == (
        "CANN's library libhccl.so can't be found: install CANN and source its set_env.sh (docs/devices.md)"
    )
    assert answers["all"]["missing"].startswith("no NPU: torch-npu finds none")


def test_other_backends_compute_what_they_do_without_torch_npu(answers: dict[str, Any]) -> None:
    made = next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]").make(1, 0, 16, BF16)
    o = CPU.run(CPU.kernel("flash@paper"), made, gradients=False).o.flatten()[:64].tolist()
    assert answers["without"]["others"] == answers["all"]["others"] == o


def test_the_stand_in_has_the_real_schemas(answers: dict[str, Any], schemas: tuple[str, ...]) -> None:
    ours = [schema.split("::", 1)[1] for schema in schemas]
    assert ours == [schema.split("::", 1)[1] for schema in answers["all"]["schemas"].values()]


def expected(name: str) -> dict[str, Any]:
    o, key = [3, 4, 5, 16], [3, 2, 7, 16]
    shapes = {"o": [o, "torch.bfloat16"]}
    if name != "npu_prompt_flash":
        shapes["lse"] = [[3, 4, 5, 1], "torch.float32"]
    if name.startswith("npu_fusion"):
        shapes |= {gradient: [shape, "torch.bfloat16"] for gradient, shape in (("dq", o), ("dk", key), ("dv", key))}
    return shapes


@pytest.mark.parametrize(
    "name", list(dict.fromkeys(kernel.name for kernel in (*npu_kernels(), *every_fusion_attention())))
)
def test_every_call_binds_and_returns_what_the_package_s_meta_registrations_say(
    answers: dict[str, Any], name: str
) -> None:
    for masked in ("plain", "causal", "padded", "causal and padded"):
        assert answers["all"]["vendor"][f"{name}, {masked}"] == expected(name), masked


def test_every_layout_is_one_that_the_package_s_documents_name(answers: dict[str, Any]) -> None:
    layouts = [(operator, layout) for operator, layout in answers["all"]["layouts"]]
    assert {layout for operator, layout in layouts if operator == "npu_fusion_attention"} == set(LAYOUTS)
    for operator, layout in layouts:
        # The backward operator has no document of its own.
        text = answers["all"]["documents"][operator.removesuffix("_grad")]
        line = next(line for line in text.splitlines() if line.startswith("input_layout: "))
        names = "".join(letter if letter.isascii() and letter.isalpha() else " " for letter in line).split()
        if operator == "npu_fused_infer_attention_score":  # names them in the lines for each product that follow
            names = [word for word in ("BSH", "BSND", "BNSD") if word in text]
        assert layout in names, f"{operator} takes {names}"


def test_every_operation_of_the_composed_kernels_is_there_on_an_npu_and_in_fp32(answers: dict[str, Any]) -> None:
    assert {"aten.bmm.default", "aten.exp.default", "aten.amax.default"} <= set(answers["all"]["operations"])
    # An operation of the CPU alone, so that the question is seen to be one.
    assert answers["all"]["unregistered"] == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert answers["all"]["float64"] == []
