"""Kernels to audit: the Triton kernels in their standard settings, each kind of rounding once."""

from collections.abc import Hashable, Iterator

from tiebreak.kernels.triton.config import Config
from tiebreak.kernels.triton.roster import Compilation, compilations


def sources() -> list[Compilation]:
    """Kernels of the roster that bring a rounding plan or a shift rule that no other has, in the roster's order.

    Raises:
        ValueError: triton is not installed.
    """
    every = list(compilations())
    facets: set[Hashable] = set()
    names: set[str] = set()
    for compilation in sorted(every, key=_order):
        news = set(_facets(compilation))
        if news - facets:
            names.add(compilation.name)
        facets |= news
    return [compilation for compilation in every if compilation.name in names]


def _order(compilation: Compilation) -> bool:
    """The stochastic forward pass first: it has a plan and the dither too, which then needs no kernel of its own."""
    return not (compilation.name.endswith("/forward") and _config(compilation).plan.stochastic)


def _facets(compilation: Compilation) -> Iterator[Hashable]:
    """What distinguishes a function's assembly: the parts of the plan and the rule that the function uses."""
    config = _config(compilation)
    plan, (_, _, function) = config.plan, compilation.name.partition("/")
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


def _config(compilation: Compilation) -> Config:
    config = compilation.constexprs["C"]
    assert isinstance(config, Config)
    return config
