"""What a user may change in a kernel, as `tiebreak gate`, `gate --across` and pytest's `--baseline` see it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiebreak.reports.cli import main
from tiebreak.reports.records import store

KERNEL = """
import torch

def attention(q, k, v{causal}, scale=None):
    s = (q.float() @ k.float().transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if {masks}:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    {body}
    return o, {lse}
"""
SOUND = {
    "causal": ", *, causal=False",
    "masks": "causal",
    "body": "o = (p @ v.float() / l).to(q.dtype)",
    "lse": "(m + l.log()).squeeze(-1)",
}
BIASED = "o = ((p.to(q.dtype) @ v) / l.to(q.dtype)).to(q.dtype)"
CASES = "tied_maxima[k=2],random_causal,sink_tie,log_sum_exp"
RUN = {"--kernel": "mine.py:attention", "--cases": CASES, "--heads": "64", "--out": "out"}
PLAN = {"--plan": "flash@fp32_inside"}
HELD, FELL = 0, 1


@dataclass(frozen=True)
class Row:
    """One change, and the exit codes of the gate, of it across platforms, and of pytest's gate."""

    change: str
    says: str  # what some line of the first two says
    codes: tuple[int, int, int] = (FELL, FELL, FELL)
    kernel: dict[str, str] | None = None  # what differs from the sound one
    words: dict[str, str] | None = None  # what differs on the command line
    before: dict[str, str] | None = None  # what the baseline's command line has beside
    name: str = "attention"


ROWS = (
    Row("nothing", "gate held: 4 cells compared", (HELD, HELD, HELD)),
    Row("sound to biased", "tied_maxima[k=2]-bf16: verdict biased, unbiased in the baseline", kernel={"body": BIASED}),
    Row("biased, and its plan declared", "tied_maxima[k=2]-bf16: verdict biased, unbiased in the baseline",
        kernel={"body": BIASED}, words={"--plan": "flash@all_bf16"}),
    # Where the kernel is not biased the declaration is a note between platforms; at the sink it is biased.
    Row("plan declared", "sink_tie-bf16: declares flash@fp32_inside, no plan in the baseline", words=PLAN),
    Row("plan dropped", "prediction no longer asked", before=PLAN),
    Row("renamed", "no cell is in both", words={"--kernel": "mine.py:renamed"}, name="renamed"),
    Row("case dropped", "random_causal-bf16: turned into a skip", kernel={"causal": "", "masks": "False"}),
    # P in bf16, O cast once: as sound on ties, and biased at the sink as before. Other bits are a note.
    Row("P in bf16", "2 cells with other bits than in the baseline", (HELD, HELD, HELD),
        kernel={"body": "o = (p.to(q.dtype).float() @ v.float() / l).to(q.dtype)"}),
    Row("lse", "log_sum_exp-bf16: fell, ", kernel={"lse": "(m + l.log()).squeeze(-1) + 1"}),
    Row("crash", "crashed, ", kernel={"body": "raise ValueError('no')\n    o = 0"}),
)  # fmt: skip


def run(matrix: Callable[..., pytest.RunResult], row: Row, *gate: str, sound: bool) -> pytest.RunResult:
    """Run the row's kernel, or the one before the change."""
    parts = SOUND | ({} if sound else row.kernel or {})
    source = KERNEL.format(**parts)
    words = RUN | ((row.before if sound else row.words) or {})
    Path("mine.py").write_text(source if sound else source.replace("attention", row.name))
    return matrix(*(word for pair in words.items() for word in pair), *gate)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.change)
def test_a_change_of_a_kernel(
    row: Row, matrix: Callable[..., pytest.RunResult], capsys: pytest.CaptureFixture[str], kept_bases: dict[str, bytes]
) -> None:
    which = str(row.before)
    if which not in kept_bases:
        assert run(matrix, row, "--baseline", "base.json", "--update-baseline", sound=True).ret == 0
        kept_bases[which] = Path("base.json").read_bytes()
    Path("base.json").write_bytes(kept_bases[which])
    gated = run(matrix, row, "--baseline", "base.json", sound=False)
    assert store.read(Path("out/last.json")).records
    capsys.readouterr()
    codes = []
    for across in ((), ("--across",)):
        codes.append(main(["gate", "base.json", "out/last.json", *across]))
        told = "".join(capsys.readouterr())
        assert row.says in told
    assert (*codes, gated.ret) == row.codes


@pytest.fixture(scope="module")
def kept_bases() -> dict[str, bytes]:
    """Baselines of the sound kernel, by how it was run: each is made once."""
    return {}
