"""The pages of the cases, one for each group: a picture of each input, and what the emulated kernels make of it."""

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from tiebreak.cases.case import Case
from tiebreak.cases.gpt2.snippets import GROUP, SNIPPETS, Snippet
from tiebreak.cases.scripted import GROUPS
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.reference import reference
from tiebreak.programs.listing import claimed
from tiebreak.reports.records import store
from tiebreak.reports.records.order import kernel_places
from tiebreak.reports.records.record import Record
from tiebreak.reports.tables import marks

_BASELINE = Path("reports/baselines/emulation.json")
_SEED, _HEADS = 1, 16  # what is drawn is the first head of the baseline's own input
_KEYS = 2048  # of a picture, at most
_WIDTH, _HEIGHT, _GAP = 640, 84, 34  # of one of the two panels, and between them, in units of about a pixel
_LEFT = 64
_FAILURE = "An input on which rounding is known to fail."


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """The pages: their places below docs/ and their Markdown.

    Args:
        root: of the checkout.
    """
    records: dict[str, list[Record]] = {}
    baseline = store.read(root / _BASELINE)
    places = kernel_places([baseline])
    for record in sorted(baseline.records, key=lambda record: places[record.kernel]):
        records.setdefault(record.case, []).append(record)
    groups: dict[str, Sequence[Case | Snippet]] = {**GROUPS, GROUP: tuple(SNIPPETS.values())}
    yield "cases/index.md", _index(groups)
    for about, group in groups.items():
        parts = [f"# {_title(about)}", *(_section(case, records.get(case.name, [])) for case in group)]
        yield f"cases/{_slug(about)}.md", "\n\n".join(parts) + "\n"


def _index(groups: dict[str, Sequence[Case | Snippet]]) -> str:
    lines = [
        "# Cases",
        "",
        "A case is one input of attention, made from a seed, with claims about what rounding does to it. The groups",
        "are the mechanisms that the cases try. `tiebreak list cases NAME` tells the same on a terminal.",
        "",
        f"**!** {_FAILURE}",
    ]
    for about, group in groups.items():
        page = f"{_slug(about)}.md"
        lines += ["", f"## [{_title(about)}]({page})", "", "| case | | input |", "|---|---|---|"]
        for case in group:
            fails = "**!**" if isinstance(case, Case) and case.failure else ""
            lines.append(f"| [`{case.name}`]({page}#{_slug(case.name)}) | {fails} | {_text(case.about)} |")
    return "\n".join(lines) + "\n"


def _section(case: Case | Snippet, records: Sequence[Record]) -> str:
    parts = [f"## `{case.name}` {{ #{_slug(case.name)} }}", _sentence(case.about)]
    if isinstance(case, Case):
        parts += [_FAILURE] if case.failure else []
        parts += [_picture(case)]
        claims = [f"- {_text(claimed(claim))}" for claim in case.claims]
        parts += ["Claims, of which the first that concerns a kernel holds:", "\n".join(claims)] if claims else []
    else:
        parts += [f"{case.steps} steps of training."]
        variants = [", ".join(f"`{name}`" for name in sorted(claim.variants)) for claim in case.claims]
        lines = [f"- {names}: {_text(claim.text)}" for names, claim in zip(variants, case.claims, strict=True)]
        parts += ["Claims:", "\n".join(lines)] if lines else []
    if case.unclaimed:
        parts.append(f"Nothing is claimed of other kernels: {_text(case.unclaimed)}.")
    parts += _measured(records)
    return "\n\n".join([*parts, f"Source: {_text(case.source)}."])


def _measured(records: Sequence[Record]) -> list[str]:
    shown = [(record.kernel, marks.plain_text(record)) for record in records if record.shown is not None]
    if not shown:
        return []
    chips = " ".join(f'<span class="cell"><code>{escape(name)}</code> {escape(text)}</span>' for name, text in shown)
    return ["Emulated, in bf16, from the committed baseline:", f'<p class="cells">{chips}</p>']


def _picture(case: Case) -> str:
    """The scores of the last row of the first head, and the largest column of V, by key, of the first keys."""
    inputs = case.make(_SEED, 0, _HEADS, BF16)
    ref = reference(inputs)
    hidden = inputs.hidden()
    seen = torch.ones_like(ref.s[0, 0, -1], dtype=torch.bool)
    if hidden is not None:
        seen = ~hidden.expand_as(ref.s)[0, 0, -1]
    row, v = ref.s[0, 0, -1], inputs.expanded_v()[0, 0].double()
    column = v[:, int(v.nan_to_num(0, 0, 0).abs().sum(0).argmax())]
    row, seen, column = (x[:_KEYS] for x in (row, seen, column))
    height = 2 * (_HEIGHT + _GAP)
    top = _panel(row, seen, "S", 0)
    bottom = _panel(column, seen, "V", _HEIGHT + _GAP)
    label = f"scores of one row and one column of V of {case.name}"
    return (
        f'<svg class="input" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{top}{bottom}</svg>\n\n"
        "*Above: the scores S of one row, by key; the maxima stand out. Below: one column of V.*"
    )


def _panel(values: Tensor, seen: Tensor, name: str, top: int) -> str:
    """Stems from zero, by key; of the scores the largest, which is where the row's shift comes from, stand out."""
    shown: list[tuple[int, float]] = [
        (key, value)
        for key, (value, is_seen) in enumerate(zip(values.tolist(), seen.tolist(), strict=True))
        if is_seen and math.isfinite(value)
    ]
    if not shown:
        return f'<text x="{_LEFT}" y="{top + _HEIGHT / 2:.0f}">{name}: nothing finite is seen</text>'
    largest = max(value for _, value in shown)
    low, high = min([0.0, *(value for _, value in shown)]), max(0.0, largest)
    step = (_WIDTH - _LEFT - 8) / len(values)

    def y(value: float) -> float:
        return top + 12.0 + (high - value) / ((high - low) or 1.0) * (_HEIGHT - 14)

    stems = {"rest": "", "top": ""}
    for key, value in shown:
        kind = "top" if name == "S" and value == largest else "rest"
        stems[kind] += f"M{_LEFT + (key + 0.5) * step:.1f} {y(0):.1f}V{y(value):.1f}"
    lines = "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in stems.items() if path)
    ends = "".join(
        f'<text x="{_LEFT - 6}" y="{y(end) + 4:.1f}" text-anchor="end">{end:.4g}</text>' for end in sorted({low, high})
    )
    named = f'<text class="name" x="4" y="{top + 12 + _HEIGHT / 2:.0f}">{name}</text>'
    return f'<path class="axis" d="M{_LEFT} {y(0):.1f}H{_WIDTH - 8}"/>{lines}{ends}{named}'


def _text(text: str) -> str:
    """Plain text as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def _sentence(text: str) -> str:
    return f"{_title(_text(text))}."


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
