"""The documentation as a site: it is built, every page is in it, and a link that leads nowhere is found."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiebreak.backends.provenance import CHECKOUT
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.studies import site

PAGES = [*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md"), *(CHECKOUT / "examples").rglob("*.md")]
LINK = re.compile(r"""(?:\]\(|<img src=")([^)\s"#]+)""")


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
    assert [case.name for case in SCRIPTED if f'aria-label="scores S of one row of {case.name}"' not in cases] == []
    assert 'id="tiebreak.kernels.plans.RoundingPlan"' in rendered[tmp_path / "site" / "docs" / "site" / "api.html"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CHECKOUT).as_posix())
def test_links_carry_titles_and_lead_to_files_that_the_site_has(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`(?!\])", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert page.name == "CHANGELOG.md" or re.findall(r"\[`?[\w/-]+\.md`?\]\([^)]*\)", text) == []
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in links if not (page.parent / link).exists()] == []
    copied = {path.name for name in site._COPIED for path in CHECKOUT.glob(name)}
    tops = {(page.parent / link).resolve().relative_to(CHECKOUT).parts[0] for link in links}
    assert tops <= copied


def test_every_page_has_its_place_in_the_menu() -> None:
    settings = (CHECKOUT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    menu = re.findall(r"([\w/-]+\.md)$", settings, re.MULTILINE)
    own = {page.relative_to(CHECKOUT).as_posix() for page in PAGES} - {"SECURITY.md"}
    assert sorted(menu) == sorted(own | {"docs/cases/index.md"})
