"""Bad usage of the laboratory's verbs and of levels: one line that says what to do, and nothing is left behind."""

from pathlib import Path

import pytest

from tiebreak.reports.cli import main

GIVEN = {
    "train": "--sequences 2 --kernel fair --steps 6",
    "sweep": "--layers 3 --heads 2 --width 8 --context 8 --sequences 2 --warm-up 1 --steps 3 --attention same"
    " --formats E8M7 --kernels flash@paper --lr 1e-2",
    "sharpness": "--steps 2 --more 2 --every 1 --held-out 4 --attention same",
    "fleet": "",
    "levels": "",
}
BAD = [
    ("train", "--data nowhere", "train.bin: no such file"),
    ("train", "--resume", "checkpoint.pt: no such file; start without --resume"),
    ("train", "--kernel flsh@paper", "unknown kernel 'flsh@paper'"),
    ("train", "--steps 0", "argument --steps: must be at least 1, not 0"),
    ("train", "--at-once 4", "--at-once 4 does not divide the 2 sequences of a process"),
    ("train", "--heads 5", "width 64 is no multiple of 5 heads"),
    ("train", "--preset gpt3", "argument --preset: invalid choice: 'gpt3'"),
    ("train", "--in-layers 2", "--in-layers 2: expected LAYER=KERNEL or LAYER.HEAD=KERNEL"),
    ("train", "--in-layers 3=fair", "--in-layers 3=fair: the model has 2 layers of 4 heads, from 1"),
    ("sweep", "--lr 1e-3,nan", "argument --lr: expected a number above 0, not nan"),
    ("sweep", "--formats E1M0", "argument --formats: unknown format 'E1M0'"),
    ("sweep", "--formats E8M7:inner=-20 --attention same", "--formats: E8M7:inner=-20: attention has no range"),
    ("sweep", "--attention E8M7:inner=-20", "argument --attention: E8M7:inner=-20: attention has no range of its own"),
    ("sweep", "--formats ,", "argument --formats: no format named"),
    ("sweep", "--kernels flash@nowhere", "argument --kernels: unknown kernel 'flash@nowhere'"),
    ("sweep", "--stabiliser qk_nrm", "argument --stabiliser: unknown stabiliser 'qk_nrm': did you mean qk_norm"),
    ("sweep", "--stabiliser tf32_first --layers 2", "--stabiliser tf32_first: a model of 2 layers has no other"),
    ("sweep", "--stabiliser tf32_first --formats tf32", "--stabiliser tf32_first: tf32 has no more bits than tf32"),
    ("sweep", "--on slrum", "--on slrum: expected ray, ray://"),
    ("sweep", "--gpus-per-run 0.5", "--gpus-per-run: --on ray shares out"),
    ("sweep", "--data nowhere", "nowhere/train.bin: no such file"),
    ("sharpness", "--formats E8M3:inner=4:outer=3", "the range is empty"),
    ("sharpness", "--steps 3 --every 2", "--steps 3 and --more 2 must be multiples of --every 2"),
    ("fleet", "--on here", "--on here: expected ray, ray://HOST:PORT"),
    ("levels", "--arch vax", "aarch64"),
    ("levels", "--sysroot here", "--arch"),
    ("levels", "--save=mine", "--save"),
    ("levels", "--save mine", "--save"),
    ("levels", "--arch aarch64 --level graviton", "unknown level 'graviton'"),
]


@pytest.mark.parametrize(("verb", "words", "message"), BAD)
def test_bad_usage_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, words: str, message: str
) -> None:
    out, name = tmp_path / "out", verb if verb == "levels" else f"lab {verb}"
    assert main([*name.split(), *GIVEN[verb].split(), "--out", str(out), *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tiebreak {name}: ")
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()
