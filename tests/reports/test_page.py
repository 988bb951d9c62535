"""The page and its figures without a browser; see test_page_browser.py for the rest."""

import base64
import gzip
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import Call, failing, record, run, trained
from tiebreak.reports.page.command import page
from tiebreak.reports.page.figures import figures
from tiebreak.reports.page.svg import draw, ticks
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Record, Run

Keep = Callable[[Run, str], Path]
EVIL = "</script><script>document.title='hacked'</script>&\"'<img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """All start tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def data_of(html: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/gzip" id="data">(.*?)</script>', html)
    assert match
    parsed: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return parsed


def evil_run() -> Run:
    trace = records.TraceRecord((0.0, 1.0), (1,))
    cells = [record(EVIL, f"tied_maxima[k={k}]", evidence={"trace": trace} if k == 2 else {}) for k in (2, 3)]
    cells.append(trained(EVIL))
    failed = record("b", EVIL, outcome="failed", answers={EVIL: records.Answer(False, EVIL, EVIL)}, excused=EVIL)
    failed = replace(failed, shown=records.Shown(EVIL, 1.0, EVIL))
    odd = record("c", "d", experiment=EVIL, measures={EVIL: 1.0})
    described = {
        "measures": {EVIL: records.MeasureRecord(EVIL, EVIL, column=True)},
        "experiments": {EVIL: records.ExperimentRecord(EVIL, EVIL, EVIL)},
    }
    return run(*cells, failed, odd, platform={"cpu": EVIL, "torch": EVIL, "os": EVIL}, **described)


def test_the_script_asks_answers_for_what_the_data_have() -> None:
    html = page([evil_run()], ["here"], [])
    answers = [answer for cell in data_of(html)["cells"] for answer in cell["records"][0]["answers"]]
    names = re.search(r"answers\.map\(\(\{ (.*?) \}\)", html)
    assert names
    assert all(set(names[1].split(", ")) == answer.keys() for answer in answers)
    assert False in [answer["passed"] for answer in answers]


def test_the_page_is_one_file_that_asks_for_nothing(telling: Run) -> None:
    html = page([telling], ["here"], figures([telling], ["here"]))
    tags = Tags(html).found
    for tag, attributes in tags:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,"
        # The policy allows the one style and the one script by their digests, and nothing inline.
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
    assert "url(" not in html
    (policy,) = (attributes["content"] for _, attributes in tags if attributes.get("http-equiv"))
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; img-src data:; style-src 'sha256-[^' ]*'; script-src 'sha256-[^' ]*'", policy
    )
    assert html.count("<script") == 2


def test_it_answers_its_title_then_says_what_failed_then_the_findings() -> None:
    wrong = {"checks": {"bound": records.CheckRecord("within its bound", wrong=True)}}
    bad = record("mine", outcome="failed", answers={"bound": records.Answer(False, "within", "<5 times>")})
    html = page([run(bad, options={"kernel": "x.py:mine"}, **wrong)], ["here"], [])
    body = html[html.index("<h1>") :]
    first, failed, findings_ = body.index("wrong on 1 of 1"), body.index("What failed"), body.index('id="findings"')
    assert first < failed < findings_ < body.index('id="platforms"') < body.index('id="map"')
    assert "<b>failed cpu-mine-random-bf16</b><div>    &lt;5 times&gt;</div><code>    rerun: pytest " in body
    held = page([run(record(), platform={"commit": "0123456789abcdef0123-dirty"})], ["here"], [])
    assert "What failed" not in held
    (summary,) = re.findall(r"<li><b>here</b> \((.*?)\)", held)
    assert summary == "torch 2.13.0, os Linux 6.1, commit 0123456789ab-dirty, seed 1, heads 256"


def test_what_is_beyond_a_digest_is_folded() -> None:
    html = page([run(*(failing(case=f"case_{number}") for number in range(12)))], ["here"], [])
    opened, folded = html[html.index("What failed") :].split("<summary>", 1)
    assert opened.count("<li>") == 8
    assert folded.startswith("4 more</summary>")
    assert "case_11" in folded


def test_strings_of_records_are_escaped() -> None:
    run_ = evil_run()
    html = page([run_], [EVIL], figures([run_], [EVIL]))
    tags = [tag for tag, _ in Tags(html).found]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert "<img" not in html
    assert '<div id="pooled-map">' in html
    assert EVIL in {cell["kernel"] for cell in data_of(html)["cells"]}


def test_the_data_have_every_cell_once_and_what_platforms_say_alike_once(telling: Run) -> None:
    other = [
        replace(record, digest="f" * 16) if record.case == "no_tail" else record for record in telling.records[:-1]
    ]
    data = data_of(page([telling, replace(telling, records=tuple(other))], ["a", "b"], []))
    assert len(data["cells"]) == len(telling.records)
    second = [cell["records"][1] for cell in data["cells"]]
    assert second.count(None) == 1
    assert second.count(0) == len(telling.records) - 2
    assert sum(isinstance(told, dict) for told in second) == 1


def test_what_cancels_or_shrank_has_no_colour() -> None:
    far = {"bias": records.Estimate(-113.0, 0.01)}
    shrunk = record(case="shrunk", measures=far, verdict="biased", shown=records.Shown(records.SHRUNK, 0.28))
    cells = [shrunk, record(case="sum", measures=far, verdict=None), record(case="far", measures=far, verdict="biased")]
    data = data_of(page([run(*cells)], ["here"], []))
    tones = {data["cases"][cell["place"]]["name"]: cell["records"][0]["tone"] for cell in data["cells"]}
    assert tones == {"shrunk": None, "sum": None, "far": -113.0}


def test_what_a_search_for_a_plan_came_to_is_shown() -> None:
    found = record(evidence={records.IDENTITY: records.Explanation("follows", ("flash@fused",), 3)})
    ((name, text),) = data_of(page([run(found)], ["a"], []))["cells"][0]["records"][0]["evidence"]["more"]
    assert (name, json.loads(text)["plans"]) == (records.IDENTITY, ["flash@fused"])


def test_cases_stand_in_the_order_of_the_file_and_a_measure_is_a_column_if_it_says_so() -> None:
    described = {
        "measures": {"wobble": records.MeasureRecord("made up", "deg", column=True)},
        "experiments": {"swing": records.ExperimentRecord("a swing", "what wobbles.", headline="rms_ulps")},
        "cases": {name: records.CaseRecord(f"about {name}", group="swings") for name in ("z", "a")},
    }
    cells = [record(case=case, experiment="swing", measures={"wobble": 0.25}) for case in ("z", "a")]
    html = page([run(*cells, **described)], ["a"], [])
    data = data_of(html)
    assert [(case["name"], case["about"], case["group"]) for case in data["cases"]] == [
        ("z", "about z", "swings"), ("a", "about a", "swings")
    ]  # fmt: skip
    columns = {measure["name"] for measure in data["measures"] if measure["column"]}
    assert "wobble" in columns
    assert "rms_ulps" in columns  # what tables show
    assert "error_over_bound" not in columns
    assert "<p>swing: what wobbles.</p>" in html


def test_figures_show_the_most_biased_and_the_least() -> None:
    def tied(kernel: str, bias: float, at_one: tuple[int, ...], error: float) -> list[Record]:
        bins = records.HistogramRecord(-1.0, 1.0, (3, 1), 0)
        trace = records.TraceRecord((0.0, error), at_one)
        return [
            record(kernel, f"tied_maxima[k={k}]", measures={"bias": records.Estimate(bias / k, 0.01)},
                   evidence={"trace": trace, "histogram": bins} if k == 2 else {})
            for k in (2, 4)
        ]  # fmt: skip

    cells = [*tied("plain", 0.5, (1,), 0.1), *tied("twin", 0.4, (1,), 0.1), *tied("mild", 0.3, (1,), 0.2),
             *tied("milder", 0.2, (1,), 0.3), *tied("fixed", 0.0, (), 0.4), *tied("worse", 0.6, (), 0.5)]  # fmt: skip
    trace, histogram, fall = figures([run(record()), run(*cells)], ["empty", "full"])
    assert [line.label for line in trace.series] == ["plain", "mild", "fixed", "worse"]
    assert trace.note.endswith("From full.")
    assert trace.series[0].marked == ((1.0, 0.1),)
    assert histogram.series[0].points == ((-1.0, 0.75), (0.0, 0.75), (0.0, 0.25), (1.0, 0.25))
    assert fall.series[0].points == ((1.0, 0.25), (2.0, 0.125))
    theory = fall.series[-1]
    assert (theory.dashed, theory.points) == (True, ((1.0, 0.25), (2.0, 0.125)))
    assert figures([run(record())], ["empty"]) == []


def test_the_page_begins_with_the_mechanism_where_errors_were_kept() -> None:
    def traced(kernel: str, bias: float, at_one: tuple[int, ...], **bins: records.HistogramRecord) -> Record:
        evidence = {"trace": records.TraceRecord((0.0, bias), at_one), **bins}
        return record(kernel, measures={"bias": records.Estimate(bias, 0.01)}, evidence=evidence)

    bins = records.HistogramRecord(-1.0, 0.5, (0, 1, 5, 4), 0)
    breaks, cures = traced("<breaks>", 0.234, (1,), histogram=bins), traced("cures", 0.013, (), histogram=bins)
    beginning = page([run(record()), run(breaks, cures)], ["empty", "full"], []).partition("Findings")[0]
    assert "How a broken tie becomes a bias" in beginning
    for text in ("&lt;breaks&gt;", "+0.23", "cures", "+0.01"):
        assert f">{text}<" in beginning
    for cells in ([record()], [breaks], [cures], [breaks, traced("cures", 0.013, ())]):
        assert "broken tie" not in page([run(*cells)], ["a"], [])


def test_a_drawing_puts_every_point_inside(telling: Run) -> None:
    for figure in figures([telling], ["here"]):
        text = draw(figure)
        _, _, width, height = map(float, re.findall(r'viewBox="([^"]*)"', text)[0].split())
        places = [
            tuple(map(float, pair.split(",")))
            for line in re.findall(r'points="([^"]*)"', text)
            for pair in line.split()
        ]
        assert places
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert ticks(0.0, 0.25) == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2, 0.25])
    assert ticks(-0.00113, 0.00097) == pytest.approx([-0.001, -0.0005, 0.0, 0.0005])


def test_the_command_writes_the_page_unless_its_input_cannot_be_read(telling: Run, tiebreak: Call) -> None:
    Path("bad.json").write_text("{")
    refused = tiebreak("page", telling, "bad.json", "-o", "deep/page")
    assert (refused.code, "bad.json: not JSON" in refused.err) == (2, True)
    assert not Path("deep").exists()
    assert tiebreak("page", telling, "-o", "deep/page").code == 0
    assert [file.name for file in Path("deep/page").iterdir()] == ["index.html"]


DRIFT = records.SeriesFigure("delta_error", "delta's error", "Summed up.", "sum", summed=True)  # of `run`'s own case
NORM = records.SeriesFigure("wq_norm", "W_Q's norm", "It grows.", "norm")


def test_training_runs_of_every_file_have_figures_whatever_their_names() -> None:
    def one(kernel: str, value: float, **fields: Any) -> Record:
        """Each with a series of its own."""
        readings = {"delta_error": (value, None, value / 2), "wq_norm": (1.0, 2.0, 4.0)}
        return trained(kernel, value=value, evidence={"series": records.SeriesRecord((0, 1, 2), readings)}, **fields)

    first = run(
        one("flash@train", 2e-3), one("theirs", 2.8e-3), one("mild", 1e-4), one("twin", 1e-4), one("plain", -1e-3)
    )
    growth = trained("theirs", "train_runaway", measures={"wq_norm_growth": 4.0})
    # A later snippet of the same measure is another figure's matter: one is enough.
    late = trained("late", "train_late", value=1.0)
    described = {
        "train_runaway": records.CaseRecord("W_Q grows", label="Q", headline="wq_norm_growth", figure=NORM),
        "train_late": records.CaseRecord("late", label="B", headline="delta_error_mean", figure=DRIFT),
    }
    # A kernel is drawn once, where it errs most.
    second = run(one("theirs", -3e-3), one("least", 0.0), growth, late, cases=described)
    drift, norm = figures([first, second], ["here", "there"])
    assert [line.label for line in drift.series] == [
        "theirs (cpu, platform 2)", "flash@train (cpu, platform 1)", "mild (cpu, platform 1)", "least (cpu, platform 2)"
    ]  # fmt: skip
    assert drift.note.endswith("From here; there.")
    assert [total for _, total in drift.series[1].points] == pytest.approx([2e-3, 2e-3, 3e-3])
    assert [line.points for line in norm.series] == [((0.0, 1.0), (1.0, 2.0), (2.0, 4.0))]
    assert norm.series[0].label == "theirs"
    assert norm.note.endswith("From there.")
