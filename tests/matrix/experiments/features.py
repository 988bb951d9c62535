"""Calls that ask for more than softmax(Q K^T) V, and what --features adds to others."""

from collections.abc import Sequence
from functools import partial

from tiebreak.cases.case import JOINED
from tiebreak.cases.feature_cases import ADDED, FEATURED, added_features, with_features
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.experiment import Experiment, Offer
from tiebreak.matrix.experiments.call import calls_on
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import first_few, matching, split


def added_to(experiment: Experiment, words: Sequence[str]) -> Experiment | None:
    """Return an experiment with further features of inputs, in words; None where it has no inputs to add them to."""
    return experiment.on_another(partial(with_features, words=words))


class _Featured(Offer):
    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        return calls_on(FEATURED, captured, cases_named=cases_named)

    def featured(self, experiments: Sequence[Experiment], names: str, kernels: Sequence[Kernel]) -> list[Experiment]:
        listed: dict[str, None] = {}
        for name in split(names):
            matched = matching(name, ADDED) if set(name) & frozenset("*?") else []
            listed |= dict.fromkeys(matched or [name])
            if matched:
                continue
            try:
                features = added_features(name.split(JOINED))
            except ValueError as error:
                raise UsageError(f"--features: {error}") from error
            for feature in features:
                if not any(feature in kernel.takes for kernel in kernels):
                    able = list(dict.fromkeys(kernel.name for kernel in kernels))
                    verb = "takes" if len(able) == 1 else "take"
                    raise UsageError(f"--features {name}: {first_few(able, 8)} {verb} no {feature.words}")
        added = [added_to(each, name.split(JOINED)) for each in experiments for name in listed]
        if not any(added):
            raise UsageError("--features: nothing to add, or no call that it could be added to")
        return [each for each in added if each is not None]


CALLS = _Featured()
