"""What there is to audit: the Triton kernels in their standard settings, each kind of rounding once."""

from collections.abc import Hashable, Iterator

from tiebreak.kernels.triton.config import Config
from tiebreak.kernels.triton.roster import Compilation, compilations


def sources() -> list[Compilation]:
    """Kernels of the roster that bring a rounding plan or a shift rule that no other has, in the roster's order.

    Raises:
        ValueError: triton is not installed.
    """
    every = list(compilations())
    seen: set[Hashable] = set()
    kept: set[str] = set()
    for one in sorted(every, key=_order):
        news = set(_facets(one))
        if news - seen:
            kept.add(one.name)
        seen |= news
    return [one for one in every if one.name in kept]


def _order(one: Compilation) -> bool:
    """The stochastic forward pass first: it has a plan and the dither too, which then needs no kernel of its own."""
    return not (one.name.endswith("/forward") and _config(one).stochastic)


def _facets(one: Compilation) -> Iterator[Hashable]:
    """What tells a function's assembly from another's: of the plan and rule, what that function looks at."""
    config = _config(one)
    plan, (_, _, function) = config.plan, one.name.partition("/")
    if function == "delta":
        yield function, plan.delta, plan.delta_from
    elif function in ("key_gradients", "query_gradient"):
        casts = plan.s, plan.p, plan.dp, plan.ds, plan.gradients
        # A pass in fp32 throughout has no cast to read, and takes longest to compile.
        if any(cast.narrows for cast in casts):
            yield function, casts
    else:
        yield function, plan
        yield function, config.shift


def _config(one: Compilation) -> Config:
    config = one.constexprs["C"]
    assert isinstance(config, Config)
    return config
