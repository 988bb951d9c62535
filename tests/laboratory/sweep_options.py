"""The options of `tiebreak lab sweep`."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.data import Batches
from tiebreak.cases.gpt2.optimizers import CLIP
from tiebreak.laboratory.divergence import EXPLOSION_NATS, EXPLOSION_STEPS, LARGEST_LOGIT
from tiebreak.laboratory.ray_cluster import RAY, is_address
from tiebreak.laboratory.reduced import parse_reduction
from tiebreak.laboratory.reduced_gpt2 import SAME, add_attention, parse_attention
from tiebreak.laboratory.sweep_run import LOOK_EVERY, STABILISERS, Task
from tiebreak.laboratory.train_command import batches_of
from tiebreak.laboratory.train_options import add_length, add_model, configuration, fill
from tiebreak.reports.cli import Parser, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import none_named, split, unknown
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.sweeps.store import Place, Settings

DIVERGED = (
    f"its loss was NaN or Inf, or in {EXPLOSION_STEPS} steps in a row {EXPLOSION_NATS:g} nats above its lowest, or a"
    f" logit beyond {LARGEST_LOGIT:g} (looked at every {LOOK_EVERY} steps)"
)
_EPILOG = """exit codes: 0 done, whatever diverged; 2 bad usage, another sweep's store, a file cut short, no cluster;
130 stopped: the same command goes on"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, those not given at the preset's defaults.

    Raises:
        UsageError: one line that names the option.
    """
    options = parser().parse_args(argv)
    fill(options)
    options.lr = _rates(options.lr)
    options.formats = _formats(options.formats, options.attention)
    options.kernels = _kernels(options.kernels)
    options.stabiliser = _stabilisers(options.stabiliser)
    if options.on is not None and options.on != RAY and not is_address(options.on):
        raise UsageError(f"--on {options.on}: expected ray, ray://HOST:PORT or HOST:PORT")
    if not 0 <= options.gpus_per_run < math.inf:
        raise UsageError(f"--gpus-per-run must be 0 or more, not {options.gpus_per_run:g}")
    if options.gpus_per_run and options.on is None:
        raise UsageError("--gpus-per-run: --on ray shares out this machine's GPUs, too")
    _check_stabilisers(options)
    return options


def _check_stabilisers(options: argparse.Namespace) -> None:
    for name in options.stabiliser:
        for fmt in options.formats:
            refusal = STABILISERS[name].refusal(parse_reduction(fmt), options.layers)
            if refusal is not None:
                raise UsageError(f"--stabiliser {name}: {refusal}")


def _rates(text: str) -> tuple[float, ...]:
    rates = []
    for item in split(text):
        try:
            rate = float(item)
        except ValueError:
            rate = math.nan
        if not (math.isfinite(rate) and rate > 0):
            raise UsageError(f"--lr {item}: a learning rate is a number above 0")
        rates.append(rate)
    if not rates:
        raise UsageError("--lr: no learning rate named")
    return tuple(dict.fromkeys(rates))


def _formats(text: str, attention: str) -> tuple[str, ...]:
    try:
        if attention == SAME:
            names = [reduction.name for name in split(text) if (reduction := parse_attention(name))]
        else:
            names = [parse_reduction(name).name for name in split(text)]
    except ValueError as error:
        raise UsageError(f"--formats: {error}") from None
    if not names:
        raise UsageError("--formats: no format named; E8M7 is bf16")
    try:
        parse_attention(attention)
    except ValueError as error:
        raise UsageError(f"--attention: {error}") from None
    return tuple(dict.fromkeys(names))


def _kernels(text: str) -> tuple[str, ...]:
    names = list(dict.fromkeys(split(text)))
    if not names:
        raise UsageError("--kernels: no kernel named, such as flash@paper")
    for name in names:
        try:
            EMULATION.kernel(name)
        except ValueError as error:
            raise UsageError(f"--kernels: {error}") from None
    return tuple(names)


def _stabilisers(text: str) -> tuple[str, ...]:
    names = list(dict.fromkeys(split(text)))
    for name in names:
        if name not in STABILISERS:
            raise UsageError(f"--stabiliser: {unknown('stabiliser', name, STABILISERS, '--help lists')}")
    if not names:
        raise UsageError(f"--stabiliser: {none_named('stabiliser', STABILISERS, '--help lists')}")
    return tuple(names)


def settings(options: argparse.Namespace) -> Settings:
    """The sweep that the options describe.

    Raises:
        DataError: no data to train on.
    """
    recipe = {
        "preset": options.preset,
        **asdict(configuration(options)),
        "steps": options.steps,
        "warm_up": options.warm_up,
        "sequences": options.sequences,
        "attention": options.attention,
        "optimizer": f"adamw, gradients clipped at {CLIP:g}",
        "data": _first_batches(options).digest(1),
    }
    return Settings(
        SCHEMA, recipe, DIVERGED, options.seeds, options.lr, options.formats, options.kernels, options.stabiliser
    )


def _first_batches(options: argparse.Namespace) -> Batches:
    return batches_of(options.data, configuration(options), options.sequences, 1)


def tasks(options: argparse.Namespace, places: Sequence[Place]) -> list[Task]:
    """What processes are given to run these places."""
    data, device = options.data and options.data.resolve(), "cuda" if options.gpus_per_run else "cpu"
    sizes, digest = configuration(options), _first_batches(options).digest(1)
    shared = (sizes, options.steps, options.warm_up, options.sequences, options.attention, data, digest, device)
    return [Task(place, *shared) for place in places]


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="tiebreak lab sweep",
        description="How often training diverges: a small GPT-2 over seeds, learning rates, formats and kernels.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_axes(made.add_argument_group("what varies (comma lists)"))
    trained = made.add_argument_group("what is trained")
    add_model(trained)
    add_length(trained)
    _add_where(made.add_argument_group("where and how"))
    return made


def _add_axes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seeds", type=positive, default=20, metavar="N", help="how many, from 1; default: 20")
    group.add_argument("--lr", default="4e-4,4e-3,1e-2", metavar="RATES", help="default: 4e-4,4e-3,1e-2")
    group.add_argument(
        "--formats",
        default="E8M7,E8M5:zero,E8M4:zero",
        metavar="NAMES",
        help="of linear layers' products; E8M7 is bf16, E8M5:zero truncates; default: E8M7,E8M5:zero,E8M4:zero",
    )
    add_attention(group)
    group.add_argument(
        "--kernels",
        default="flash@paper,stabilized@paper,fair",
        metavar="NAMES",
        help="of attention; default: flash@paper,stabilized@paper,fair",
    )
    about = "; ".join(f"{name}: {each.about}" for name, each in STABILISERS.items())
    group.add_argument("--stabiliser", default="none", metavar="NAMES", help=f"each alone. {about}; default: none")


def _add_where(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out",
        type=Path,
        default=Path("out", "sweep"),
        metavar="DIR",
        help="the sweep's folder, a file a run; a sweep that was stopped goes on there; default: out/sweep",
    )
    group.add_argument(
        "--workers", type=positive, metavar="N", help="processes (default: as many as the machine carries)"
    )
    group.add_argument(
        "--on",
        metavar="WHERE",
        help="ray: Ray on this machine; ray://HOST:PORT or HOST:PORT: a Ray cluster",
    )
    group.add_argument(
        "--gpus-per-run", type=float, default=0.0, metavar="SHARE", help="of a GPU, such as 0.25; default: 0, no GPU"
    )
