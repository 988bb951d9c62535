"""A user's own kernel: how it is found, and the contract that it is held to."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiebreak.backends.backend import CPU
from tiebreak.kernels.external import LoadError, external_kernel
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import CannotRunError

SOUND = """
from torch.nn.functional import scaled_dot_product_attention

def sound(q, k, v, *, causal=False, scale=None):
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

not_a_function = 3
"""

each_format = pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)


def _inputs(fmt: Format = BF16, *, causal: bool = False) -> AttentionInputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 4, 8, 16, generator=generator).to(TORCH_DTYPES[fmt]).float() for _ in range(4))
    return AttentionInputs(q, k, v, do, Formats.of(fmt), causal=causal)


def _run(source: str, tmp_path: Path, inputs: AttentionInputs | None = None) -> Tensor:
    """O of the function `kernel` in a file with this source."""
    file = tmp_path / "kernel.py"
    file.write_text(source)
    return CPU.run(external_kernel(f"{file}:kernel"), inputs or _inputs(), gradients=False).o


def _kernel(body: str) -> str:
    lines = body.replace("; ", "\n    ")
    return f"import torch\n\ndef kernel(q, k, v, *, causal=False, scale=None):\n    {lines}\n"


@pytest.fixture
def sound_file(tmp_path: Path) -> Path:
    file = tmp_path / "sound_kernel.py"
    file.write_text(SOUND)
    return file


def test_a_function_is_loaded_from_a_file(sound_file: Path) -> None:
    assert load(f"{sound_file}:sound").__name__ == "sound"


def test_a_function_is_loaded_from_a_module(sound_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(sound_file.parent)
    assert load("sound_kernel:sound").__name__ == "sound"
    assert load("torch.nn.functional:scaled_dot_product_attention") is scaled_dot_product_attention


def test_a_file_with_dataclasses_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "with_dataclass.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Size:\n    n: int = 1\n\ndef kernel(q, k, v):\n    return q\n"
    )
    assert callable(load(f"{file}:kernel"))


EXPECTED = "expected path/to/file.py:function, package.module:function or the name of"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((spec, EXPECTED) for spec in ("", ":", "kernel.py:", ":function", "package.module")),
        ("no_such_package.module:f", "ModuleNotFoundError"),
        ("sound_kernel.py:absent", "has no function 'absent'; its functions are sound"),
        ("sound_kernel.py:not_a_function", "has no function 'not_a_function'; its functions are sound"),
    ],
)
def test_what_can_not_be_found_is_told_with_what_is_expected(
    sound_file: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(sound_file.parent)
    with pytest.raises(LoadError, match=re.escape(message)) as caught:
        external_kernel(spec)
    assert str(caught.value).startswith(f"--kernel {spec}: ")


@each_format
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_sound_kernel_gets_tensors_of_the_format(sound_file: Path, fmt: Format, causal: bool) -> None:
    inputs = _inputs(fmt, causal=causal)
    kernel = external_kernel(f"{sound_file}:sound")
    q, k, v = (tensor.to(TORCH_DTYPES[fmt]) for tensor in (inputs.q, inputs.k, inputs.v))
    output = CPU.run(kernel, inputs, gradients=False)
    assert kernel.name == "sound"
    assert kernel.external
    assert output.o.dtype == torch.float32
    assert torch.equal(output.o, scaled_dot_product_attention(q, k, v, is_causal=causal).float())


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ("return None", "returned NoneType, not a tensor"),
        ("return ()", "returned tuple, not a tensor"),
        ("return q", "returned a view of its input q"),
        ("return v[:].unflatten(3, (4, 4)).flatten(3)", "returned a view of its input v"),
        ("raise SystemExit(3)", "called sys.exit(3)"),
        ("return {'o': q}", "returned dict, not a tensor"),
        ("return q[..., :8]", "returned shape (2, 4, 8, 8), expected (2, 4, 8, 16)"),
        ("return q.float()", "returned torch.float32, expected torch.bfloat16"),
        ("return q.to('meta')", "returned a tensor on meta, expected cpu"),
        ("q *= 2; return q.clone()", "changed its input q"),
        ("k[0, 0, 0, 0] += 1; return q.clone()", "changed its input k"),
        ("v[-1, -1, -1, -1] = 0; return q.clone()", "changed its input v"),
        ("k[0, 0, 0, 0] = torch.nan; return q.clone()", "changed its input k"),
    ],
    ids=lambda text: text if text.startswith(("returned", "changed", "called")) else "",
)
def test_a_broken_contract_is_named(tmp_path: Path, body: str, broken: str) -> None:
    with pytest.raises(CannotRunError, match=f"^{re.escape(broken)}$"):
        _run(_kernel(body), tmp_path)


@pytest.mark.parametrize(
    ("keys", "declared", "noted"), [(6, (), True), (8, (), False), (6, ("layout=hnd",), False)],
    ids=["undeclared", "any order fits", "declared"],
)  # fmt: skip
def test_a_kernel_that_raises_is_told_of_the_layout(
    tmp_path: Path, keys: int, declared: tuple[str, ...], noted: bool
) -> None:
    (tmp_path / "kernel.py").write_text(_kernel("return q.transpose(-2, -3) @ k"))
    inputs = replace(_inputs(), k=_inputs().k[:, :, :keys], v=_inputs().v[:, :, :keys])
    with pytest.raises(RuntimeError) as caught:
        CPU.run(external_kernel(f"{tmp_path / 'kernel.py'}:kernel", flags=declared), inputs, gradients=False)
    notes = getattr(caught.value, "__notes__", [])
    assert [note.endswith("--declare layout=bnhd") for note in notes] == [True] * noted


@each_format
def test_a_changed_sign_of_zero_is_a_change(tmp_path: Path, fmt: Format) -> None:
    inputs = _inputs(fmt)
    inputs.v[0, 0, 0, 0] = 0.0
    with pytest.raises(CannotRunError, match="changed its input v"):
        _run(_kernel("v[0, 0, 0, 0] = -0.0; return q.clone()"), tmp_path, inputs)


@each_format
def test_nan_inputs_left_alone_do_not_count_as_changed(tmp_path: Path, fmt: Format) -> None:
    inputs = _inputs(fmt)
    inputs.q[0, 0, 0, 0] = torch.nan
    inputs.v[0, 0, 0, 0] = torch.nan
    o = _run(_kernel("return q.clone()"), tmp_path, inputs)
    assert torch.equal(o.isnan(), inputs.q.isnan())


def test_a_kernel_cannot_change_the_inputs_of_the_next(tmp_path: Path) -> None:
    inputs = _inputs(FP32)
    before = inputs.q.clone()
    with pytest.raises(CannotRunError, match="changed its input q"):
        _run(_kernel("q.zero_(); return v.clone()"), tmp_path, inputs)
    assert torch.equal(inputs.q, before)


def test_a_kernel_that_tracks_gradients_is_detached(tmp_path: Path) -> None:
    assert not _run(_kernel("return q.clone().requires_grad_()"), tmp_path).requires_grad
