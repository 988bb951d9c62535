"""A user's kernel on several cards and in several configurations: its bits in fp32, against the interpreter's."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak.backends.interpreter.assumptions import CARDS
from tiebreak.backends.interpreter.session import interpreting
from tiebreak.backends.ptx import CARDS as SHARED
from tiebreak.backends.ptx import session
from tiebreak.backends.ptx.execution import Program
from tiebreak.backends.ptx.session import executing

FEW_LINES = Path(__file__).parents[1] / "interpreter" / "few_lines.py"
ROW_SUM = "tl.sum(p, 1)"
SHAPE = (1, 2, 64, 64)


@pytest.fixture
def mine(tmp_path: Path, module_at: Callable[[Path], ModuleType]) -> Any:
    """The kernel of a few lines, its O in fp32, with more words of a launch and another sum of a row."""

    def loaded(row_sum: str = ROW_SUM, launch: str = "") -> ModuleType:
        text = FEW_LINES.read_text()
        assert ROW_SUM in text
        text = text.replace(ROW_SUM, row_sum).replace("COLUMNS=min(64, k.shape[2])", f"COLUMNS=64{launch}")
        text = text.replace("torch.empty_like(q)", "torch.empty_like(q, dtype=torch.float32)")
        path = tmp_path / f"few_lines_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        return module_at(path)

    return loaded


def inputs(rows: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(3))
    return q[:, :, :rows], k.repeat(1, 1, 2, 1) * 1.5, torch.cat([v, v * 0.7], 2)


def executed(module: ModuleType, card: str = "sm_80", rows: int = 64) -> Tensor:
    with executing(card, SHARED[card]):
        o: Tensor = module.attention(*inputs(rows), scale=0.13)
    return o


def interpreted(module: ModuleType, card: str = "sm_80", rows: int = 64) -> Tensor:
    with interpreting(CARDS[card]):
        o: Tensor = module.attention(*inputs(rows), scale=0.13)
    return o


@pytest.mark.parametrize(
    ("row_sum", "card", "launch"),
    [
        (ROW_SUM, "sm_80", ""),
        (ROW_SUM, "sm_90", ""),
        (ROW_SUM, "sm_100", ", enable_fp_fusion=False"),
        (ROW_SUM, "sm_100", ", enable_fp_fusion=False, num_warps=8"),
        (ROW_SUM, "sm_120", ""),
        ("tl.sum(p.to(tl.bfloat16), 1)", "sm_80", ""),
        ("tl.sum(p.to(tl.bfloat16), 1)", "sm_90", ""),
        ("tl.sum(p.to(tl.bfloat16), 1)", "sm_100", ", enable_fp_fusion=False"),
        ("tl.sum(p.to(tl.float16), 1)", "sm_80", ""),
        ("tl.sum(p.to(tl.float16), 1)", "sm_90", ""),
    ],
)
def test_the_interpreter_sums_rows_in_the_order_of_the_compiled_code(
    row_sum: str, card: str, launch: str, mine: Any
) -> None:
    """In fp32, which hides nothing; and in bf16, where every sum of two is rounded."""
    module = mine(row_sum, launch)
    assert torch.equal(executed(module, card), interpreted(module, card))


@pytest.mark.parametrize(
    ("card", "rows", "warps"),
    [("sm_80", 16, 4), ("sm_90", 32, 8), ("sm_100", 16, 2), ("sm_100", 64, 2), ("sm_120", 32, 4)],
)
def test_rows_that_warps_share_are_summed_in_the_order_of_the_compiled_code(
    card: str, rows: int, warps: int, mine: Any
) -> None:
    """With fewer rows than columns each warp has some columns; two warps of sm_100 have no tcgen05."""
    module = mine(launch=f", enable_fp_fusion=False, num_warps={warps}")
    assert torch.equal(executed(module, card, rows), interpreted(module, card, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("card", ["sm_80", "sm_90"])
def test_a_product_goes_unrounded_into_a_sum_unless_a_branch_lies_between(
    card: str, dtype: torch.dtype, module_at: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    module = module_at(Path(__file__).with_name("few_products.py"))
    x, y = torch.randn((2, 512), generator=torch.Generator().manual_seed(0)).to(dtype)
    with executing(card, SHARED[card]):
        compiled = module.sums(x, y, 2)
    with interpreting(CARDS[card]):
        assert torch.equal(module.sums(x, y, 2), compiled)
    rounded = expected = x.view(2, -1)[0]
    (first, other), factor = x.view(2, -1), y[:256]
    for step in range(4):
        rounded = rounded * factor + first
        expected = expected * factor + (other if step < 2 else first)
    assert not torch.equal(compiled[:256], rounded)
    assert torch.equal(compiled[256:], expected)


def test_older_assemblers_fuse_what_a_row_sum_is_multiplied_by(mine: Any) -> None:
    module = mine(launch=", enable_fp_fusion=False, num_warps=2")  # four rows a thread, two of them packed
    q, k, v = inputs()
    k[:, :, 64:] *= 1.25  # a row's maximum grows, so that its sum shrinks
    with executing("sm_120", SHARED["sm_120"]):
        newer = module.attention(q, k, v)
    with executing("sm_120/13.0", SHARED["sm_120"]):
        older = module.attention(q, k, v)
    assert not torch.equal(newer, older)
    torch.testing.assert_close(newer, older, rtol=1e-6, atol=0)


def test_cards_of_one_tensor_core_and_four_and_eight_warps_round_alike(mine: Any) -> None:
    first = executed(mine())
    assert torch.equal(executed(mine(), "sm_89"), first)
    assert torch.equal(executed(mine(launch=", num_warps=8"), "sm_86"), first)
    assert not torch.equal(executed(mine(launch=", enable_fp_fusion=False")), first)


@pytest.mark.parametrize(
    ("card", "synchronises"),
    [
        ("sm_80", r"bar\.sync|cp\.async\.wait_group"),
        ("sm_90", r"bar\.sync|cp\.async\.wait_group|fence\.proxy\.async|wgmma\.(?:fence|commit_group|wait_group)"),
        (
            "sm_100",
            r"bar\.sync|cp\.async\.wait_group|fence\.proxy\.async|tcgen05\.(?:wait::st|commit)|mbarrier\.try_wait",
        ),
    ],
)
def test_every_barrier_that_is_left_out_of_the_compiled_code_is_missed(
    card: str, synchronises: str, mine: Any, left_out: Callable[..., Any]
) -> None:
    """On sm_90 and sm_100 one of every kind: there Triton has some where nothing is to be kept apart."""
    # Before the first wait nobody has read, and a barrier (Triton 3.7 has one) keeps nothing apart.
    since, every = "cp.async.wait_group", card == "sm_80"
    tried = left_out(lambda: executed(mine(), card), card, synchronises, since=since, every=every)
    assert {name for name, missed in tried if missed} == {name for name, _ in tried}
    assert len(tried) > 3
    assert not every or all(missed for _, missed in tried)


def _in_bf16(text: str) -> str:
    """The first sum of a row's pairs, as a compiler might do it that takes the kernel's word for its type."""
    at = text.index("shfl.sync.bfly", text.index("ex2.approx"))
    place = text.rindex("add.f32", 0, at)
    line = text[place : text.index(";", place) + 1]
    target = line.split()[1].rstrip(",")
    rounded = f"{{ .reg .b16 cut; cvt.rn.bf16.f32 cut, {target}; cvt.f32.bf16 {target}, cut; }}"
    return text.replace(line, f"{line}\n\t{rounded}", 1)


def _contracted(text: str) -> str:
    """A product and the difference that it goes into as one operation."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        words = line.replace(",", " ").replace(";", " ").split()
        if words[:1] == ["sub.rn.f32"]:
            made = next((i for i in range(at) if lines[i].split()[:2] == ["mul.rn.f32", f"{words[2]},"]), None)
            if made is not None:
                x, y = lines[made].replace(",", " ").replace(";", " ").split()[2:4]
                lines[at] = f"\tneg.f32 {words[1]}, {words[3]};\n\tfma.rn.f32 {words[1]}, {x}, {y}, {words[1]};"
    return "\n".join(lines)


@pytest.mark.parametrize(("edit", "launch"), [(_in_bf16, ""), (_contracted, ", enable_fp_fusion=False")])
def test_what_a_compiler_does_wrong_shows_in_its_code_and_not_in_the_source(
    edit: Any, launch: str, mine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mine(launch=launch)
    sound, source = executed(module), interpreted(module)
    assert torch.equal(sound, source)
    monkeypatch.setattr(session, "_program", lambda text, card: Program(edit(text), card))
    # The launcher keeps what it was given first: another module is compiled anew.
    wrong = executed(mine(launch=launch))
    assert not torch.equal(wrong, sound)
    assert (wrong - sound).abs().max() < 0.05
    assert torch.equal(interpreted(module), source)
