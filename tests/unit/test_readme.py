"""The README, the pages behind it and their site: links lead somewhere, snippets run as they stand there."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.feature_cases import EVERY
from tiebreak.kernels.external import external_kernel
from tiebreak.reports import cli
from tiebreak.reports.page import mechanism
from tiebreak.reports.records.record import CLAIM, PASSED, PREDICTION
from tiebreak.studies import site, tie
from tiebreak.studies.cells import judged

ROOT = Path(__file__).parents[2]
README, EXTENDING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = (README, EXTENDING, *sorted((ROOT / "docs").glob("*.md")))
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(page for name in ("docs", "examples", "findings") for page in (ROOT / name).rglob("*.md")),
]
LINK = re.compile(r"""(?:\]\(|<img src=")([^)\s"]+)""")
FIGURES = ROOT / "docs" / "figures"
YOURS = "Check a kernel"
MOST_WORDS = 700
STAND_IN = Path(__file__).with_name("on_a_stand_in_device.py")


def snippet(page: Path, heading: str) -> str:
    """The first Python block under a heading."""
    section = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    match = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert match is not None, heading
    assert len(match[1].splitlines()) < 30, "it is short"
    return match[1]


def names_of(heading: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(snippet(EXTENDING, heading), names)
    return names


def prose(page: Path) -> str:
    """A page without its code blocks."""
    fenceless = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<=\n\n)( {4}.*\n)+", "", fenceless)


def commands(page: Path) -> list[str]:
    """The lines of the indented blocks, which are for a shell."""
    blocks = re.findall(r"(?<=\n\n)(?: {4}.*\n)+", page.read_text(encoding="utf-8"))
    return [line.strip() for block in blocks for line in block.splitlines()]


def anchors(page: Path) -> set[str]:
    """What a link to a page may name: its headings as GitHub writes them, and the anchors in its tables."""
    text = prose(page)
    headings = (re.sub(r"[^\w -]", "", heading).lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {heading.replace(" ", "-") for heading in headings} | set(re.findall(r'<a id="([^"]+)">', text))


def test_readme_is_short_and_its_commands_run_from_a_fresh_clone() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS
    shown = [command.partition(" #")[0].rstrip() for command in commands(README)]
    assert shown == ["make matrix", "make test", "pip install .", "tiebreak check my.py:attention"]
    assert "make --keep-going test ||" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_carry_titles_and_lead_to_files_that_the_site_has(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`(?!\])", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert page.name == "CHANGELOG.md" or re.findall(r"\[`?[\w/-]+\.md`?\]\([^)]*\)", text) == []
    links = [link.partition("#") for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    found = [((page.parent / file).resolve() if file else page, anchor) for file, _, anchor in links]
    assert [file for file, anchor in found if not file.exists() or (anchor and anchor not in anchors(file))] == []
    copied = {path.name for name in site._COPIED for path in ROOT.glob(name)}
    assert {file.relative_to(ROOT).parts[0] for file, _ in found} <= copied


def test_readme_leads_to_every_page() -> None:
    """Straight, or over other pages."""
    reached, new = {README}, {README}
    while new:
        targets = {
            (page.parent / name).resolve() for page in new for name in re.findall(r"\]\(([^)\s#]+)", prose(page))
        }
        new = (targets & set(PAGES)) - reached
        reached |= new
    assert set(PAGES) - reached == set()


def test_picture_is_right() -> None:
    picture = mechanism.TEMPLATE.read_text(encoding="utf-8")
    number = r"(\d+\.\d+)"

    def drawn(pattern: str) -> list[float]:
        return [float(found) for found in re.search(pattern.replace("N", number), picture).groups()]  # type: ignore[union-attr]

    first, second, total = drawn(r">N \+ N = N, a tie<")
    (even,), (odd,), (tail,) = drawn(r">N \(even\)"), drawn(r">N \(odd\)"), drawn(rf">{total} \+ N<")

    def rounded(x: float) -> float:
        return torch.tensor(x).bfloat16().item()

    assert [rounded(x) for x in (first, second, even, odd)] == [first, second, even, odd]
    assert first + second == total == (even + odd) / 2
    assert rounded(first + second) == even
    assert rounded(first + second + tail) == odd


def test_picture_is_what_its_script_draws_of_what_a_run_gives() -> None:
    sides: dict[str, mechanism.HistogramSide] = tie.sides()
    assert (FIGURES / "tie.svg").read_text(encoding="utf-8") == mechanism.drawing(*sides.values())
    for kernel, side in sides.items():
        record = judged(EMULATION.kernel(kernel), "tied_maxima[k=2]", 256, backend=EMULATION)
        assert record.evidence["histogram"] == side.errors
        assert record.number("bias") == pytest.approx(side.bias, abs=1e-9)


def sample(text: str) -> list[str]:
    """Lines of a verdict, without what a CPU's own sums decide; bf16 instructions read subnormal numbers as 0."""
    masked = re.sub(r",accumulator=\w+|\d+\.\d+ % of bits|off by [\d.e-]+ %|subnormal_v x0, ", "", text)
    return [line.rstrip() for line in masked.splitlines()]


def test_sample_is_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command of the README, in one process: its verdict, its exit code and how many cells it says there are."""
    (tmp_path / "my.py").write_text(snippet(README, YOURS), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    verb, *arguments = commands(README)[-1].split()[1:]
    assert cli.main([verb, *arguments, "-n", "0"]) == 0
    printed = capfd.readouterr().out
    shown = re.search(r"```text\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    lines = sample(shown[1])
    assert sample(printed)[: len(lines)] == lines
    ran = re.search(r"^(\d+) cells: ", printed, re.MULTILINE)
    assert ran is not None
    assert f"All {ran[1]} cells" in prose(README)


def test_the_decorator_of_the_page_is_read(tmp_path: Path) -> None:
    file = tmp_path / "my_attention.py"
    file.write_text(snippet(ROOT / "docs" / "your-kernel.md", "What the signature does not tell"), encoding="utf-8")
    declaration = external_kernel(f"{file}:attention").declaration
    assert declaration is not None
    assert declaration.label == "flash@fused,base=2"


def test_added_case_runs_and_its_claim_holds() -> None:
    case = names_of("Add a case")["TWO_MAXIMA"]
    record = judged(CPU.kernel("flash@paper"), case, 256)
    assert record.outcome == PASSED, record.reasons
    assert record.passed(CLAIM)


def test_added_kernel_is_predicted_on_a_device() -> None:
    kernel = names_of("Add a kernel")["KERNEL"]
    device = replace(EMULATION, name="device", predicts=False)
    record = judged(kernel, "random", 256, backend=device)
    assert record.outcome == PASSED, record.reasons
    assert record.passed(PREDICTION)
    assert record.number("equal_bits") == 1.0


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch-npu takes the one device that torch leaves free")
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices written in Python",
)
def test_added_backend_does_all_kinds_of_experiments_on_a_device_without_fp64(tmp_path: Path) -> None:
    """And gets the CPU's numbers, which computes in the stand-in too."""
    example = tmp_path / "mps.py"
    example.write_text(snippet(EXTENDING, "Add a backend"), encoding="utf-8")
    done = subprocess.run([sys.executable, STAND_IN, example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert [text.split(" ")[-1] for text in answer["refused"]] == ["float64", "CPU"], "the stand-in is too kind"
    device, cpu = answer["device"], answer["cpu"]
    assert device["call"] == cpu["call"]
    assert device["call"][0] == PASSED
    assert [device[name] for name in ("losses", "log_probabilities")] == [cpu["losses"], cpu["log_probabilities"]]
    # Which are sums, over tensors that lie in another order in memory.
    assert device["monitors"] == pytest.approx(cpu["monitors"], rel=1e-6, nan_ok=True)
    assert device["fingerprint"] == cpu["fingerprint"]


@pytest.mark.skipif(find_spec("zensical") is None, reason="zensical is not installed: pip install -e '.[docs]'")
def test_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    assert site.main([str(tmp_path)]) == 0
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = {path: path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")}
    fetched = re.compile(r"""<(?:script|img)[^>]* src=["']?(?:https?:)?//|<link[^>]*rel="(?:stylesheet|icon)"[^>]*//""")
    assert [path for path, text in rendered.items() if fetched.search(text)] == []
    cases = "".join(text for path, text in rendered.items() if path.parent.name == "cases")
    assert [case.name for case in EVERY if f'aria-label="scores S of one row of {case.name}"' not in cases] == []
    assert 'id="tiebreak.kernels.plans.RoundingPlan"' in rendered[tmp_path / "site" / "docs" / "site" / "api.html"]


def test_every_page_has_its_place_in_the_menu() -> None:
    settings = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    menu = re.findall(r"([\w/-]+\.md)$", settings, re.MULTILINE)
    own = {page.relative_to(ROOT).as_posix() for page in DOCUMENTS} - {"SECURITY.md"}
    assert sorted(menu) == sorted(own | {"docs/cases/index.md"})
