"""Build the documentation as a site of HTML files: `make docs`, or python -m tiebreak.studies.site.

The Markdown files are written for a reader of the repository, and their links hold there. Here they are laid out as the
site wants them, with their links turned, beside the pages that are made: cases, gallery, API. Zensical renders them. A
link that leads nowhere is an error, in the Markdown and in what has been rendered. Nothing is fetched from the network.
"""

import argparse
import importlib.util
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from tiebreak.studies import case_pages

ROOT = Path(__file__).parents[2]
HERE = ROOT / "docs" / "site"
#: Pages of the site whose text stands outside of docs/, or in a folder of its own.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "example.md": "examples/my-kernel/README.md",
    **{
        f"{page.parent.name}.md": page.relative_to(ROOT).as_posix()
        for page in sorted((ROOT / "docs" / "reports").glob("*/README.md"))
    },
}
#: Modules that code outside of the suite names, by what a reader wants with them.
API = {
    "A kernel": ("tiebreak", "tiebreak.kernels.kernel", "tiebreak.kernels.inputs", "tiebreak.kernels.features"),
    "Rounding": (
        "tiebreak.kernels.formats",
        "tiebreak.kernels.plans",
        "tiebreak.kernels.shift_rules",
        "tiebreak.kernels.reference",
    ),
    "Cases": ("tiebreak.cases.case", "tiebreak.cases.claims", "tiebreak.cases.errors", "tiebreak.cases.verdicts"),
    "Backends": ("tiebreak.backends.backend",),
    "Experiments": ("tiebreak.matrix.experiment", "tiebreak.matrix.result"),
    "Records": ("tiebreak.reports.records.record", "tiebreak.reports.records.store", "tiebreak.reports.gate.gate"),
}
_LINK = re.compile(r"""(\]\(|<img src=")([^)\s"]+)(\)|")""")  # of Markdown, and a picture of a width of its own
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Lay out, render, check; the exit code is 1 where a link leads nowhere, 2 where the site can't be built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "docs", help="folder (default: out/docs)")
    folder: Path = parser.parse_args().out
    if importlib.util.find_spec("zensical") is None:
        print("docs: zensical is not installed; `make docs` installs it", file=sys.stderr)
        return 2
    settings = folder / "mkdocs.yml"
    if folder.exists() and any(folder.iterdir()) and not settings.exists():
        print(f"docs: {folder} has other things in it; name a folder of its own", file=sys.stderr)
        return 2
    lay_out(folder)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(settings)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=False)
    if rendered.returncode != 0:
        print(rendered.stdout + rendered.stderr, file=sys.stderr)
        return 2
    site = folder / "site"
    broken = list(broken_links(site))
    print("\n".join([*broken, f"docs: {site / 'index.html'}"]))
    return 1 if broken else 0


def lay_out(folder: Path) -> None:
    """Write the sources of the site.

    Args:
        folder: for them; the pages of an earlier site go.
    """
    shutil.rmtree(folder / "pages", ignore_errors=True)
    pages = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    pages |= {place: (ROOT / source).read_text(encoding="utf-8") for place, source in ELSEWHERE.items()}
    pages |= {"api.md": _api()} | dict(case_pages.pages(ROOT))
    for place, text in pages.items():
        _write(folder / "pages" / place, outside_of_code(text, place))
    for target in sorted({file for place, text in pages.items() for file in _files(text, place)}):
        (folder / "pages" / _place(target)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / target, folder / "pages" / _place(target))
    for name in ("site.css", "iframe-worker.js"):
        shutil.copy(HERE / name, folder / "pages")
    settings = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
    _write(folder / "mkdocs.yml", settings.replace("ROOT/", f"{ROOT.as_posix()}/"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def outside_of_code(text: str, place: str) -> str:
    """A page with its links turned; blocks of code stay as they are."""

    def turn(link: re.Match[str]) -> str:
        return link[1] + _turned(link[2], place) + link[3]

    return "".join(part if part.startswith("```") else _LINK.sub(turn, part) for part in _FENCE.split(text))


def _local(link: str) -> bool:
    return "://" not in link and not link.startswith(("#", "mailto:"))


def _source_of(link: str, place: str) -> str:
    """The file of the repository that a link of a page names."""
    here = posixpath.dirname(ELSEWHERE.get(place, f"docs/{place}"))
    return posixpath.normpath(posixpath.join(here, link.partition("#")[0]))


def _place(source: str) -> str:
    """Where in the site a file of the repository stands."""
    places = {of: place for place, of in ELSEWHERE.items()}
    return places.get(source, source.removeprefix("docs/"))


def _turned(link: str, place: str) -> str:
    if not _local(link):
        return link
    _, mark, anchor = link.partition("#")
    return posixpath.relpath(_place(_source_of(link, place)), posixpath.dirname(place) or ".") + mark + anchor


def _files(text: str, place: str) -> Iterator[str]:
    """The files of the repository that a page links to and that are no pages themselves."""
    for _, link, _ in _LINK.findall(_FENCE.sub("", text)):
        source = _source_of(link, place)
        if _local(link) and not source.endswith(".md") and (ROOT / source).is_file():
            yield source


def _api() -> str:
    parts = ["# API", "What code outside of the suite names: types, arguments, units and errors."]
    for about, modules in API.items():
        parts += [f"## {about}", *(f"::: {module}" for module in modules)]
    return "\n\n".join(parts) + "\n"


class _Page(HTMLParser):
    """The anchors of a page, and where its links and pictures lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []  # what a browser fetches to show the page
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep ids, and the links of elements that have any."""
        values = dict(attrs)
        self.anchors |= {name for key in ("id", "name") if (name := values.get(key))}
        if link := values.get("src" if tag in {"img", "script"} else "href"):
            self.links.append(link)
            if tag in {"img", "script"} or values.get("rel") in {"stylesheet", "icon", "preload"}:
                self.loaded.append(link)


def broken_links(site: Path) -> Iterator[str]:
    """The links within a rendered site that lead nowhere, and what it would fetch from the network.

    Args:
        site: its folder.

    Yields:
        A line for each, with the page.
    """
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.resolve().rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        yield from (f"{where}: {link} is fetched from the network" for link in page.loaded if "//" in link)
        for link in dict.fromkeys(page.links):
            # The page for what is not there is served at any address, with links from the root of the site.
            if path.name == "404.html" or "://" in link or link.startswith(("mailto:", "data:", "javascript:")):
                continue
            target, _, anchor = link.partition("#")
            goal = path.parent / unquote(target) if target else path
            if not goal.exists():
                yield f"{where}: {link} leads nowhere"
            elif anchor and (other := pages.get(goal.resolve())) and unquote(anchor) not in other.anchors:
                yield f"{where}: {link} has no such anchor"


if __name__ == "__main__":
    sys.exit(main())
