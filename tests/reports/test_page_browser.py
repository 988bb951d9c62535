"""The page in a real browser, headless Chromium, driven over its debugging pipe: no driver and no library is needed."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import record, run, skip
from tiebreak.laboratory.audit.records import KIND, Audit, Audits
from tiebreak.reports.page.command import page
from tiebreak.reports.page.figures import figures
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--remote-debugging-pipe")
LONGEST = 60  # seconds after which a browser that hangs is killed
EVIL = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"


# The protocol's pipe is on descriptors 3 and 4. Copies above 9 come first: either may be in the other's place.
LAUNCH = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


# The page unpacks its data first; one whose script fails never is ready, and the watchdog ends that.
READY = """new Promise((done) => {
  const look = () => (document.body.dataset.ready ? done(true) : requestAnimationFrame(look));
  look();
})"""


class Browser:
    """One tab of a headless browser."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        read, self.write = os.pipe()
        self.read, write = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}"]
        launcher = [sys.executable, "-c", LAUNCH, str(read), str(write), *command]
        self.process = subprocess.Popen(launcher, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self.watchdog = threading.Timer(LONGEST, self.process.kill)
        self.watchdog.daemon = True
        self.watchdog.start()
        self.rest, self.number, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.watchdog.cancel()
        self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = os.read(self.read, 1 << 16)
            assert part, "the browser ended"
            self.rest += part
        line, self.rest = self.rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def media(self, scheme: str, media: str = "") -> None:
        """Show pages in a colour scheme, and as on paper where the medium is print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Open a file and wait until its script is through."""
        self.media(scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.ask(READY)

    def paper(self, media: str, scheme: str) -> None:
        """Show the page as on paper, or as on a screen again; the page hears of it with its next picture."""
        self.media(scheme, media)
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def of(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") == method]

    def complaints(self) -> list[Any]:
        """Errors and warnings of the console."""
        said = self.of("Runtime.consoleAPICalled")
        spoken = [each for each in said if each["type"] in ("error", "warning", "assert")]
        return [*spoken, *self.of("Runtime.exceptionThrown"), *self.of("Log.entryAdded")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def file(telling: Run, audits: Audits, tmp_path: Path) -> Path:
    """A page of two platforms and an audit, with names and a reason that would like to be code."""
    bins, traces = records.HistogramRecord(-1.0, 0.5, (0, 1, 5, 4), 0), (((0.0, 0.5), (1,)), ((0.0, 0.1), ()))
    evidence = [{"trace": records.TraceRecord(*trace), "histogram": bins} for trace in traces]
    failed: dict[str, Any] = {"outcome": "failed", "answers": {"x": records.Answer(False, EVIL, EVIL)}}
    more = (
        record(f"smooth {EVIL}", "tied_maxima[k=2]", evidence=evidence[1]),
        record(EVIL, "tied_maxima[k=2]", evidence=evidence[0], **failed),
        record(EVIL, "excused", outcome="failed", excused=EVIL, shown=records.Shown("bias", 0.5, EVIL, "biased")),
        record(EVIL, EVIL, outcome="undecided", verdict="undecided"),
        record("sdpa", "mixed", verdict=None),
        record("sdpa", "dark", measures={"bias": records.Estimate(0.9, 0.01)}),
        record("sdpa", "darkest", measures={"bias": records.Estimate(-99.0, 0.01)}),
        skip("sdpa", "slow", "timed_out"),
    )
    first = run(*telling.records, *more)
    runs, labels = [first, replace(telling, run="b" * 32)], [f"first {EVIL}", "second"]
    path = tmp_path / "index.html"
    audited = replace(audits, audits=(*audits.audits, Audit.skip(EVIL, EVIL, EVIL)), cards={**audits.cards, EVIL: EVIL})
    path.write_text(page(runs, labels, figures(runs, labels), [KIND.page({path: audited})]), encoding="utf-8")
    return path


# Every element with text of its own: the ratio of its colour to the nearest opaque background (WCAG 2, 1.4.3).
CONTRAST = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, a = 1] = channels(getComputedStyle(at).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  return WITH_TEXT.map((element) => {
    const style = getComputedStyle(element);
    const ink = channels(element.ownerSVGElement ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(ink), light(behind(element))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), element.tagName, element.textContent.slice(0, 30)];
  }).sort((x, y) => x[0] - y[0]);
})()"""

# The size at which text is seen: a figure is scaled with the page.
SIZES = """WITH_TEXT.map((element) => {
  const svg = element.ownerSVGElement;
  const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
  return parseFloat(getComputedStyle(element).fontSize) * scale;
})"""

# Elements that are seen and have text of their own.
WITH_TEXT = """[...document.querySelectorAll("body *")].filter((element) => element.getClientRects().length &&
  [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))"""


def assert_legible(browser: Browser, width: int) -> None:
    ratios = browser.ask(CONTRAST.replace("WITH_TEXT", WITH_TEXT))
    assert ratios[0][0] >= 4.5, ratios[:3]
    assert min(browser.ask(SIZES.replace("WITH_TEXT", WITH_TEXT))) >= 10
    assert browser.ask("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_it_is_legible(browser: Browser, file: Path, width: int, scheme: str) -> None:
    browser.open(file, width, scheme=scheme)
    dark = browser.ask("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    assert browser.ask("document.querySelectorAll('.mechanism svg').length") == 1
    # What is folded has to be legible, too, and the panel.
    browser.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert_legible(browser, width)
    browser.ask(f"{cell('flash@paper', 'tied_maxima[k=2]')}.click()")
    assert_legible(browser, width)
    # The column of an audit's targets stays in sight, and leaves room for the others.
    left, right = browser.ask(
        "(() => { const wide = document.querySelector('#audit ~ * .wide'); wide.scrollLeft = 300;"
        " const box = wide.querySelector('tbody th').getBoundingClientRect(); return [box.left, box.right]; })()"
    )
    assert 0 <= left < right <= 0.6 * width
    # A value has the room of a word at least.
    assert min(browser.ask("[...about.querySelectorAll('dd')].map((one) => one.offsetWidth)")) > 0.5 * min(width, 400)


def test_it_asks_for_nothing_and_names_that_would_be_code_are_text(browser: Browser, file: Path) -> None:
    browser.open(file, 1600)
    asked = [event["request"]["url"] for event in browser.of("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
    heads = browser.ask("[...document.querySelectorAll('.map thead th')].map((th) => th.textContent)")
    assert EVIL in heads
    assert browser.ask("document.querySelector('#platforms').textContent").strip().startswith("first <script>")
    # Every panel: of cells, cases and kernels.
    browser.ask("document.querySelectorAll('.map td, .map th').forEach((one) => { one.click(); about.close(); })")
    browser.ask(f"{cell(EVIL, EVIL)}.click()")
    assert EVIL in browser.ask("about.textContent")
    browser.ask(f"about.close(), {cell(EVIL, 'tied_maxima[k=2]')}.click()")
    assert browser.ask("about.querySelector('.checks li').textContent").startswith("x failed: ")
    assert browser.ask("document.title") == "tiebreak"
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.complaints() == []


def test_one_map_has_every_cell_with_the_marks_of_the_terminal(browser: Browser, file: Path) -> None:
    browser.open(file, 1600)
    assert browser.ask("document.querySelectorAll('table.map').length") == 2  # the training runs have their own
    texts = browser.ask("[...document.querySelectorAll('.map td')].map((td) => td.textContent)")
    expected = {"!NaN!", "skip", "!crash!", "!time!", "", "!+0.23 B!", "?+0.01 ??", f"(+0.50 {EVIL} B)", "+0.23 B ·"}
    assert expected <= set(texts)
    # In words, to who does not see it.
    assert browser.ask(f"{cell('flash@paper', 'tied_maxima[k=2]')}.ariaLabel") == (
        "flash@paper on emulation, tied_maxima[k=2]: +0.23 B ·, biased, passed"
    )
    assert browser.ask(f"{cell('sdpa', 'huge')}.ariaLabel").endswith("NaN or Inf where the reference is finite, failed")


@pytest.fixture
def differing(tmp_path: Path) -> Path:
    """Two platforms that differ in one cell's verdict, in another's bits, and of which one lacks a third."""
    cases = {
        "tie": records.CaseRecord("two equal maxima", "section 3", failure=True, group="ties"),
        "near": records.CaseRecord("nearly equal", group="ties"),
        "random": records.CaseRecord("numbers", group="controls"),
    }
    fits = {"flash@fused": records.FitRecord(0.0, 0.1, 0.9987)}
    evidence = {"histogram": records.HistogramRecord(-1.0, 1.0, (3, 1), 2), "fits": fits}
    tie = record(case="tie", verdict="biased", measures={"bias": records.Estimate(0.234, 0.01)}, evidence=evidence)
    explanations = {"cpu-flash@paper": records.Explanation("follows", ("flash@fused",), 3, 0.999)}
    first = run(tie, record(case="near"), record(case="random"), record("fair", "tie"), cases=cases,
                explanations=explanations, platform={"commit": "c0ffee"})  # fmt: skip
    other = replace(tie, verdict="unbiased", shown=records.Shown("bias", -0.02), digest="f" * 16,
                    measures={"bias": records.Estimate(-0.02, 0.01)})  # fmt: skip
    second = run(other, replace(first.records[1], digest="e" * 16), record("fair", "tie"), cases=cases)
    return written(tmp_path, [first, replace(second, run="b" * 32)], ["here", "there"])


NAMES = "[...document.querySelectorAll('#cells-map .name')].map((one) => one.textContent)"


def test_platforms_share_a_number_or_have_each_its_own_and_filters_leave_what_is_asked_for(
    browser: Browser, differing: Path
) -> None:
    browser.open(differing, 1000)  # few kernels leave room
    for case in ("near", "random"):
        assert browser.ask(f"{cell('flash@paper', case)}.textContent") == "+0.01 ·"
    tie = cell("flash@paper", "tie")
    assert browser.ask(f"[...{tie}.children].map((line) => line.textContent)") == ["1: +0.23 B ·", "2: -0.02 ·"]
    label = "platforms differ: platform 1: +0.23 B ·, biased, passed; platform 2: -0.02 ·, unbiased"
    assert label in browser.ask(f"{tie}.ariaLabel")
    heads = browser.ask("[...document.querySelectorAll('#cells-map tbody th')].map((th) => th.innerText)")
    assert heads == ["ties", "tie\ntwo equal maxima", "near\nnearly equal", "controls", "random\nnumbers"]
    for change, names, kernels in (
        ("failures.click()", ["tie"], ["fair", "flash@paper"]),
        ("differing.click()", ["tie"], ["flash@paper"]),
        ("failures.click(); differing.click(); words.value = 'controls'", ["random"], ["flash@paper"]),
        ("words.value = 'nothing'", [], []),
        ("words.value = ''; platform.value = '1'", ["tie", "near"], ["fair", "flash@paper"]),
    ):
        browser.ask(f"{change}; words.dispatchEvent(new Event('input')); platform.dispatchEvent(new Event('change'))")
        assert (browser.ask(NAMES), browser.ask(KERNELS)) == (names, kernels)
    assert browser.ask(f"{tie}.textContent") == "-0.02 ·"
    browser.ask("outcome.value = 'held'; outcome.dispatchEvent(new Event('change'))")
    assert sorted(row[1] for row in browser.ask(ROWS)) == ["near", "tie", "tie"]


KERNELS = "[...document.querySelectorAll('#cells-map thead th[scope=col] div')].map((one) => one.textContent)"


def test_a_click_on_a_cell_opens_all_that_is_known_of_it(browser: Browser, differing: Path) -> None:
    browser.open(differing, 390)
    browser.ask(f"{cell('flash@paper', 'tie')}.click()")
    assert browser.ask("about.open") is True
    assert browser.ask("document.getElementById('about-title').textContent") == "flash@paper on cpu, tie"
    lines = browser.ask("about.innerText")
    for text in (
        "two equal maxima", "section 3", "follows flash@fused", "Platforms differ in verdict or outcome.",
        "biased: bias 0.234 ± 0.01 ulp", "claim passed: as claimed", "source: section 4",
        "prediction passed: what flash@paper", "99.87 % of bits", "2 elements beyond", "c0ffee",
        "pytest tests/matrix --kernels flash@paper --cases 'tie'",
    ):  # fmt: skip
        assert text in lines, text
    facts = dict(
        browser.ask("[...about.querySelectorAll('dt')].map((dt) => [dt.textContent, dt.nextSibling.textContent])")
    )
    assert (facts["seed"], facts["heads"], facts["failure input"][:3]) == ("1", "256", "yes")
    side = "[...about.querySelectorAll('.side tbody tr')].map((tr) => [...tr.cells].map((one) => one.textContent))"
    assert browser.ask(side) == [
        ["1", "here", "+0.23 B ·", "biased", "passed", "a"], ["2", "there", "-0.02 ·", "unbiased", "passed", "b"]
    ]  # fmt: skip
    rows = "[...about.querySelectorAll('.numbers tr')].map((tr) => [...tr.cells].map((one) => one.textContent))"
    assert ["bias", "0.234 ± 0.01", "ulp", "mean signed error of O"] in browser.ask(rows)
    assert browser.ask("about.querySelectorAll('details[open] .histogram rect').length") == 2
    left, right = browser.ask("(() => { const box = about.getBoundingClientRect(); return [box.left, box.right]; })()")
    assert 0 <= left < right <= 390


def test_the_command_is_copied_where_the_clipboards_own_interface_refuses(browser: Browser, differing: Path) -> None:
    browser.open(differing, 1280)
    write = "async () => { throw new Error('refused'); }"
    browser.ask(f"Object.defineProperty(navigator, 'clipboard', {{value: {{writeText: {write}}}}}); 1")
    browser.ask("document.execCommand = () => { window.got = String(getSelection()); return true; }; 1")
    browser.ask(f"{cell('fair', 'tie')}.click()")
    button = "document.querySelector('#about .copy')"
    browser.ask(f"{button}.click()")
    assert browser.ask(f"Promise.resolve().then(() => 0).then(() => {button}.textContent)") == "copied"
    assert browser.ask("window.got") == "pytest tests/matrix --kernels fair --cases 'tie'"


KEYS = {"ArrowDown": 40, "ArrowRight": 39, "Enter": 13, "Escape": 27}


def press(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])


def test_arrows_walk_the_map_enter_opens_and_escape_leads_back(browser: Browser, differing: Path) -> None:
    browser.open(differing, 1280)
    browser.call("Page.bringToFront")
    browser.ask("document.querySelector('.map [tabindex]').focus()")
    place = "document.activeElement.ariaLabel || document.activeElement.textContent"
    assert browser.ask(place).startswith("fair on cpu, tie: ")
    press(browser, "ArrowRight")
    assert browser.ask(place).startswith("flash@paper on cpu, tie: ")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):  # there is no more to the right; over the heading of a group
        press(browser, key)
    assert browser.ask(place).startswith("flash@paper on cpu, random: ")
    assert browser.ask("document.querySelectorAll('.map [tabindex]').length") == 1
    press(browser, "Enter")
    assert browser.ask("document.getElementById('about-title').textContent") == "flash@paper on cpu, random"
    press(browser, "Escape")
    assert browser.ask("about.open") is False
    assert browser.ask(place).startswith("flash@paper on cpu, random: ")


ROWS = "[...document.querySelectorAll('#cells tbody tr')].map((tr) => [...tr.cells].map((td) => td.textContent))"


def test_the_sort_works_both_ways_and_leaves_what_is_missing_last(browser: Browser, file: Path) -> None:
    browser.open(file, 1600)
    for way in ("ascending", "descending"):
        browser.ask(
            "[...document.querySelectorAll('#cells th button')].find((b) => b.innerText === 'bias, ulp').click()"
        )
        biases = [row[5] for row in browser.ask(ROWS)]
        numbers = [float(text.split(" ")[0]) for text in biases if text]
        assert numbers == sorted(numbers, reverse=way == "descending")
        assert biases[len(numbers) :] == [""] * (len(biases) - len(numbers)) != []
        sorts = browser.ask("[...document.querySelectorAll('#cells th[aria-sort]')].map((th) => th.ariaSort)")
        assert [sort for sort in sorts if sort != "none"] == [way]


SHEET = 1047  # px: A4 on its side, less its margins


def test_on_paper_no_map_is_cut_off_and_nothing_is_folded(browser: Browser, tmp_path: Path) -> None:
    scheme = "dark"
    kernels = [f"stabilized_{number}@all_bf16" for number in range(40)]
    wide = [(kernel, f"repeated_large[r={r}]") for kernel in kernels for r in (20, 10000)]
    cells = [record(*names, verdict="biased", outcome="failed") for names in wide]
    other = [replace(cell, verdict="unbiased") for cell in cells]
    path = written(tmp_path, [run(*cells), run(*other, run="b" * 32)], ["here", "there"])
    browser.open(path, SHEET, scheme=scheme)
    browser.paper("print", scheme)
    seen = "[...document.querySelectorAll('TAGS')].filter((one) => one.getClientRects().length)"
    tables = seen.replace("TAGS", "table.map")
    assert max(browser.ask(f"{tables}.map((one) => one.getBoundingClientRect().right)")) <= SHEET
    assert browser.ask(f"{tables}.length") > 1
    heads = browser.ask(f"{seen.replace('TAGS', '.map thead th div')}.map((one) => one.textContent)")
    assert heads == sorted(kernels)
    assert max(browser.ask(f"{seen.replace('TAGS', '.map .name')}.map((one) => one.offsetHeight)")) < 25
    assert browser.ask("document.documentElement.scrollWidth") <= SHEET
    assert browser.ask("[...document.querySelectorAll('details')].every((one) => one.open)")
    assert browser.ask("getComputedStyle(document.body).color") == "rgb(26, 26, 26)"
    browser.paper("", scheme)
    assert browser.ask("document.querySelectorAll('table.map').length") == 1
    assert not browser.ask("[...document.querySelectorAll('details')].some((one) => one.open)")


def test_a_measure_may_have_the_name_of_a_field(browser: Browser, tmp_path: Path) -> None:
    names = ("case", "__proto__", "platform")
    described = {name: records.MeasureRecord(name, column=True) for name in names}
    browser.open(written(tmp_path, [run(record(measures=dict.fromkeys(names, 7.0)), measures=described)]), 1600)
    assert browser.complaints() == []
    ((_, case, *values),) = browser.ask(ROWS)
    assert (case, values.count("7")) == ("random", len(names))


def cell(kernel: str, case: str) -> str:
    """An expression: the element of a map's cell."""
    fits = f"td.cell && td.cell.kernel === {json.dumps(kernel)} && td.cell.case.name === {json.dumps(case)}"
    return f"[...document.querySelectorAll('.map td')].find((td) => {fits})"


def written(folder: Path, runs: Sequence[Run], labels: Sequence[str] = ("one",)) -> Path:
    path = folder / "written.html"
    path.write_text(page(runs, labels, []), encoding="utf-8")
    return path
