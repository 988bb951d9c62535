"""What acceptance rules see, docs/rules.md: its tables are what the script makes."""

import pytest

from tiebreak.programs.pages import rules as script
from tiebreak.programs.pages.tables import renewed

PAGE = script.PAGE.read_text(encoding="utf-8")


def columns(source: str) -> dict[str, dict[str, str]]:
    """The columns of a table of the page, by kernel."""
    lines = PAGE.partition(f"<!-- from {source} -->")[2].partition("<!-- end -->")[0].strip().splitlines()
    (_, *kernels), _, *rows = (line.strip("| ").split(" | ") for line in lines)
    return {kernel.strip("`"): {row[0]: row[place + 1] for row in rows} for place, kernel in enumerate(kernels)}


def test_the_sources_are_those_of_the_rules() -> None:
    assert renewed(PAGE, "sources", script.sources()) == PAGE


def test_columns_of_the_disease_and_the_cure_are_what_a_run_gives() -> None:
    name = "tied_maxima[k=2]"
    bench, told = script.bench_of(name, script.HEADS), columns(name)
    assert tuple(told) == tuple(script.KERNELS)
    for kernel in ("flash@paper", "stabilized@paper"):
        assert script.column(bench, kernel) == told[kernel]


def test_a_column_of_gradients_is_what_a_run_gives() -> None:
    bench = script.bench_of("tied_maxima[k=2]", script.FEWER_HEADS, gradients=True)
    assert (
        script.column(bench, "flash@fused", gradients=True) == columns("gradients of tied_maxima[k=2]")["flash@fused"]
    )


@pytest.mark.parametrize("case", script.CASES)
def test_one_line_agrees_with_this_suite_on_every_input_and_kernel(case: str) -> None:
    for kernel, column in columns(case).items():
        assert column["this suite"].endswith("B") is column["`signed_mean`"].startswith("**"), kernel


IN_README = {
    "FlashAttention-2 and -3": ("flash_attention_2", "flash_attention_3"),
    "FlashInfer, vLLM, TransformerEngine, cuDNN, `torch.testing` and Ascend": (
        *("flashinfer", "vllm", "transformer_engine", "cudnn_frontend", "torch_assert_close", "ascend_l2"),
    ),
    "Cambricon's": ("cambricon",),
    "msprobe's balance of": ("msprobe_balance",),
    "mean error with its sign": ("signed_mean",),
}


def test_the_readme_says_what_the_page_says() -> None:
    readme = (script.PAGE.parents[1] / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    passed, fails = readme.partition("the first column passes")[2].split(" It fails ")[:2]
    ties, random = columns("tied_maxima[k=2]")["flash@paper"], columns("random")
    for told, rules in IN_README.items():
        failing = {ties[f"`{rule}`"].startswith("**") for rule in rules}
        assert failing == {told in fails.partition("## ")[0]} != {told in passed}, told
    assert random["flash@paper"]["`msprobe_balance`"].startswith("**")
    assert columns("tied_maxima[k=2]")["stabilized@paper"]["`cambricon`"].startswith("**")
