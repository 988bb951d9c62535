"""The documentation as a site: it is built, every page is in it, and a link that leads nowhere is found."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiebreak.cases.scripted import SCRIPTED
from tiebreak.programs.pages import site as build

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


@pytest.mark.skipif(find_spec("zensical") is None, reason="zensical is not installed: pip install -e '.[docs]'")
def test_site_is_built_and_no_link_leads_nowhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tiebreak.programs.pages.site", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"docs: {tmp_path}/site/index.html"]), done.stderr
    cases = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site" / "cases").glob("*.html"))
    assert [
        case.name for case in SCRIPTED if f"scores of one row and one column of V of {case.name}" not in cases
    ] == []
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert 'id="tiebreak.kernels.plans.RoundingPlan"' in api


def test_links_carry_titles() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = [link for page in pages for link in re.findall(r"\[`?[\w/-]+\.md`?\]\([^)]*\)", page.read_text("utf-8"))]
    assert named == []


def test_every_page_has_its_place_in_the_menu() -> None:
    menu = re.findall(r"([\w/-]+\.md)$", (SITE / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(build.ELSEWHERE)
    assert set(menu) == pages | {"api.md", "cases/index.md"}
    assert len(menu) == len(set(menu))


@pytest.mark.parametrize(
    ("place", "link", "turned"),
    [
        ("index.md", "docs/words.md#outcomes", "words.md#outcomes"),
        ("index.md", "CONTRIBUTING.md", "contributing.md"),
        ("words.md", "../README.md#start", "index.md#start"),
        ("words.md", "ci.md", "ci.md"),
        ("ci.md", "../reports/records/store.py", "reports/records/store.py"),
        ("example.md", "../../docs/ci.md", "ci.md"),
        ("words.md", "#outcomes", "#outcomes"),
        ("words.md", "https://arxiv.org/abs/2510.04212", "https://arxiv.org/abs/2510.04212"),
    ],
)
def test_link_between_files_becomes_one_between_pages(place: str, link: str, turned: str) -> None:
    text = f"[a]({link})\n\n```text\n[a]({link})\n```\n"
    assert build.outside_of_code(text, place) == f"[a]({turned})\n\n```text\n[a]({link})\n```\n"


def test_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">a</h1><a href="#top">x</a><a href="b.html#there">x</a><a href="b.html#gone">x</a>'
        '<img src="none.svg"><a href="c.html">x</a><a href="https://example.org/none">x</a>'
        '<script src="https://example.org/shim"></script>'
    )
    (tmp_path / "b.html").write_text('<td><a id="there"></a></td><a href="#nowhere">x</a>')
    assert list(build.broken_links(tmp_path)) == [
        "a.html: https://example.org/shim is fetched from the network",
        "a.html: b.html#gone has no such anchor",
        "a.html: none.svg leads nowhere",
        "a.html: c.html leads nowhere",
        "b.html: #nowhere has no such anchor",
    ]
