"""`make release`: one version, a changelog that is cut, an sdist with all that a clone has."""

import subprocess
from pathlib import Path

import pytest

from tiebreak.backends.provenance import CHECKOUT
from tiebreak.programs import release
from tiebreak.reports.errors import UsageError

CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- a thing\n\n## 0.0.9 (2026-01-01)\n"
yaml = pytest.importorskip("yaml")


def test_what_is_unreleased_is_cut_once() -> None:
    once = release.cut(CHANGELOG, "0.1.0", "2026-11-23")
    assert once.startswith("# Changelog\n\n## Unreleased\n\n## 0.1.0 (2026-11-23)\n\n### Added\n\n- a thing\n")
    with pytest.raises(UsageError, match=r"has a section 0\.1\.0: raise the version"):
        release.cut(once, "0.1.0", "2026-11-24")
    with pytest.raises(UsageError, match="nothing under"):
        release.cut(once, "0.2.0", "2026-11-24")


def test_the_version_stands_in_one_place_and_is_repeated_right() -> None:
    version = release.project()["version"]
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert citation["references"][0]["url"] == "https://arxiv.org/abs/2510.04212"
    for page in (CHECKOUT / "docs" / "ci.md", *(CHECKOUT / "examples").rglob("*.yml")):
        named = set(page.read_text(encoding="utf-8").split("OWNER/tiebreak")[1:])
        assert [text[:20] for text in named if text.startswith("@v") and not text.startswith(f"@v{version}\n")] == []


def test_a_release_waits_for_what_only_a_person_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "undone", lambda version: ["CHANGELOG.md lacks it"])
    monkeypatch.setattr(release, "_build", lambda out: pytest.fail("built"))
    assert release.main([]) == 2
    assert capsys.readouterr().err == "release: CHANGELOG.md lacks it\n"


def test_a_step_that_fails_is_one_line_and_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(out: Path) -> list[Path]:
        raise subprocess.CalledProcessError(3, ["twine", "check", tmp_path])

    monkeypatch.setattr(release, "_build", fails)
    assert release.main(["--rehearse"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"release: exit code 3: twine check {tmp_path}"


def test_the_sdist_has_every_tracked_file_but_what_only_a_clone_uses() -> None:
    """By the lines of MANIFEST.in: to build one takes the network."""
    listed = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no clone: there is nothing to compare with")
    lines = [line.split() for line in (CHECKOUT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    grafted = tuple(f"{words[1]}/" for words in lines if words[:1] == ["graft"])
    included = {name for words in lines if words[:1] == ["include"] for name in words[1:]}
    assert [name for name in included if not (CHECKOUT / name).exists()] == []
    itself = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", ".gitignore"}
    packages = ("kernels/", "backends/", "cases/", "reports/")
    left = set(listed.stdout.split()) - included - itself
    assert [name for name in left if not name.startswith((*grafted, *packages, ".typing/"))] == []
