"""`make release`: sdist and wheel, built in isolation, checked, installed into empty environments, and tried there.

What it leaves in dist/ a person can upload with the command that it prints last.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiebreak.backends.provenance import CHECKOUT
from tiebreak.reports.cli import HELD, USAGE, Parser
from tiebreak.reports.errors import UsageError

PLACEHOLDER = "OWNER"  # of who publishes, in a repository that nobody has published yet
_UNRELEASED = "## Unreleased"
# The matrix' quick part, as an installed package has it: what is known to fail, and what mends it.
_QUICK = ("--backend", "emulation,cpu", "--kernels", "flash@paper,stabilized@paper,fair,sdpa_flash",
          "--cases", "tied_maxima*,sink_tie,random", "--heads", "64")  # fmt: skip
# The budget is one that no busy machine spends before the first cell.
_KERNEL = ("--cases", "tied_maxima[k=2],sink_tie,random", "--heads", "64", "--budget", "30m")
# Of the tests those that need little beside what the package needs itself.
_TESTS = (
    *("tests/reports", "--deselect", "tests/reports/test_page_browser.py"),
    *(f"tests/unit/test_{name}.py" for name in ("plans", "formats", "budget", "conventions", "example")),
)
_TEST_NEEDS = ("jsonschema", "hypothesis", "ml_dtypes", "gfloat", "PyYAML")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: its arguments, those of the process by default.

    Returns:
        0; 1 if a step failed; 2 if there is something left that a person has to do first.
    """
    options = _parser().parse_args(arguments)
    version = project()["version"]
    if options.cut:
        changelog = CHECKOUT / "CHANGELOG.md"
        changelog.write_text(cut(changelog.read_text(encoding="utf-8"), version, _today()), encoding="utf-8")
        return HELD
    left = list(undone(version))
    for line in left:
        print(f"release: {line}", file=sys.stderr)
    if left and not options.rehearse:
        return USAGE
    try:
        made = _build(options.out)
        for artifact in made:
            print(f"release: trying {artifact.name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="tiebreak-release-") as folder:
                _try(artifact, Path(folder))
    except subprocess.CalledProcessError as error:
        print(f"release: exit code {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    print(f"release: {version} is ready. To push it:\n  git tag v{version} && git push origin v{version}")
    print(f"  python -m twine upload {' '.join(map(str, made))}")
    return HELD


def project() -> dict[str, str]:
    """What pyproject.toml says of the project: the one place that has the version."""
    read: dict[str, str] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return read


def cut(changelog: str, version: str, date: str) -> str:
    """The changelog with what is unreleased under a version, and nothing unreleased yet.

    Raises:
        UsageError: nothing is unreleased, or the version has a section.
    """
    if f"## {version}" in changelog:
        raise UsageError(f"CHANGELOG.md has a section {version}: raise the version in pyproject.toml")
    before, found, after = changelog.partition(f"{_UNRELEASED}\n")
    if not found or not re.match(r"\s*[^#\s]|\s*###", after):
        raise UsageError(f"CHANGELOG.md has nothing under {_UNRELEASED}")
    return f"{before}{_UNRELEASED}\n\n## {version} ({date})\n{after}"


def undone(version: str) -> Iterator[str]:
    """What only a person can do, a line each."""
    for name, mark in (("CHANGELOG.md", f"## {version} ("), ("CITATION.cff", f"version: {version}\n")):
        if mark not in (CHECKOUT / name).read_text(encoding="utf-8"):
            yield f"{name} lacks {mark.strip()!r}{': make release ARGS=--cut' if name == 'CHANGELOG.md' else ''}"
    if PLACEHOLDER in (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"):
        yield f"pyproject.toml: put who publishes in the place of {PLACEHOLDER}"
    if _run("git", "status", "--porcelain", where=CHECKOUT, capture=True):
        yield "git status: commit first"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m tiebreak.programs.release", description="Build a release, and try it.")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "dist", metavar="DIR", help="default: dist")
    parser.add_argument(
        "--rehearse", action="store_true", help="go on though something is left that a person has to do"
    )
    parser.add_argument("--cut", action="store_true", help="put what is unreleased in the changelog under the version")
    return parser


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _build(out: Path) -> list[Path]:
    """Build in isolation, the wheel from the sdist, and check both; the wheel, then the sdist."""
    for old in out.glob("tiebreak-*"):
        old.unlink()
    # The sources lie in four folders that are no tiebreak/: what setuptools has left in build/ would go in too.
    _run(sys.executable, "-m", "build", "--outdir", out, CHECKOUT)
    wheel, sdist = (next(out.glob(f"tiebreak-*{end}")) for end in (".whl", ".tar.gz"))
    _run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    _run(Path(sys.executable).with_name("check-wheel-contents"), wheel, where=CHECKOUT)
    _run(Path(sys.executable).with_name("pyroma"), "--min", "8", sdist)
    return [wheel, sdist]


def _try(artifact: Path, folder: Path) -> None:
    """Install it into an empty environment, and check a kernel and the matrix there; of an sdist run its tests."""
    _run(sys.executable, "-m", "venv", folder / "venv")
    programs, kernel = folder / "venv" / "bin", folder / "elsewhere"
    kernel.mkdir()
    # The versions that the suite was last seen to pass with: the newest of all others is another day's news.
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "-c", CHECKOUT / "constraints.txt")
    _run(*pip, artifact)
    example = CHECKOUT / "examples" / "my-kernel" / "attention.py"
    _run(programs / "tiebreak", "check", f"{example}:attention", *_KERNEL, where=kernel)
    _run(programs / "pytest", "-p", "tiebreak.matrix.plugin", "-p", "no:cacheprovider", "--pyargs", "tiebreak.matrix",
         *_QUICK, where=kernel)  # fmt: skip
    if artifact.suffix == ".gz":
        shutil.unpack_archive(artifact, folder)
        (unpacked,) = folder.glob("tiebreak-*")
        # What pytest compiled no uninstallation removes, and it would hide the editable one.
        _run(programs / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "tiebreak")
        for left in folder.glob("venv/lib/python*/site-packages/tiebreak"):
            shutil.rmtree(left)
        _run(*pip, "--editable", unpacked, *_TEST_NEEDS)
        _run(programs / "pytest", "-q", "-p", "no:cacheprovider", *_TESTS, where=unpacked)


def _run(*words: str | Path, where: Path | None = None, capture: bool = False) -> str:
    """Run a program in silence of this one's paths; what it printed, if that is captured.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(words, cwd=where, env=environment, check=True, text=True,
                          stdout=subprocess.PIPE if capture else None)  # fmt: skip
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
