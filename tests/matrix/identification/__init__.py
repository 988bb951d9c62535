"""Which rounding plan a kernel follows, from its outputs alone: designed inputs, the space of plans, the search.

What says which plan a kernel follows, and who asks:

1. `tiebreak.matrix.candidates` has the known plans, `tiebreak.kernels.backward_passes` the known backward passes and
   `tiebreak.cases.slips` the usual mistakes: all are candidates, told apart by shares of equal bits.
2. In every cell of a kernel that declares nothing, `tiebreak.matrix.attribution` says how many bits each candidate has
   of O. `held_to` takes the plan with most, or the one with most on normal numbers, and `backward_attribution` the
   backward pass, for the checks of accuracy and of gradients.
3. Once a kernel, `identify` asks designed inputs and climbs from the known plans, change by change, to a plan that
   need not be known: the command of that name, and the cell `identity`.
4. At the end of a run `tiebreak.matrix.explain` has one answer for each kernel, which tables and verdicts read: what
   the search came to, or else the candidate with most bits in all cells.
"""
