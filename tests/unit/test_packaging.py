"""What is shipped: one version, a wheel without what a checkout alone uses, an sdist with all that a clone has."""

import runpy
import subprocess
import tomllib
from typing import Any

import pytest

from tiebreak.backends.provenance import CHECKOUT

yaml = pytest.importorskip("yaml")
setuptools: Any = pytest.importorskip("setuptools")


def test_the_version_stands_in_one_place_and_is_repeated_right() -> None:
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert citation["references"][0]["url"] == "https://arxiv.org/abs/2510.04212"
    for page in (CHECKOUT / "docs" / "ci.md", *(CHECKOUT / "examples").rglob("*.yml")):
        named = set(page.read_text(encoding="utf-8").split("OWNER/tiebreak")[1:])
        assert [text[:20] for text in named if text.startswith("@v") and not text.startswith(f"@v{version}\n")] == []


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


@pytest.mark.parametrize("editable", [True, False])
def test_a_wheel_leaves_out_what_only_a_checkout_uses(editable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(CHECKOUT / "setup.py"))
    left = ["tiebreak.defects", "tiebreak.laboratory", "tiebreak.studies"]
    build = given["cmdclass"]["build_py"](setuptools.Distribution({"packages": ["tiebreak", "tiebreak.matrix", *left]}))
    build.editable_mode = editable
    build.ensure_finalized()
    assert build.packages == ["tiebreak", "tiebreak.matrix", *(left if editable else [])]
    verbs = {"tiebreak.verbs": ["pair = tiebreak.programs.pair:main", "lab.train = tiebreak.laboratory.train:main"]}
    distribution = setuptools.Distribution({"name": "some", "version": "1", "entry_points": verbs})
    given["cmdclass"]["egg_info"](distribution).ensure_finalized()
    assert distribution.entry_points == {"tiebreak.verbs": verbs["tiebreak.verbs"][:1]}
