"""Which rounding plan a kernel follows, from its outputs alone: designed inputs, the space of plans, the search.

What says which plan a kernel follows, and who asks:

1. `tiebreak.matrix.candidates` has the known plans, `tiebreak.kernels.backward_passes` the known backward passes and
   `tiebreak.cases.slips` the usual mistakes: all are candidates, told apart by shares of equal bits.
2. `known` asks a kernel that declares nothing of designed inputs, once, whatever its cells: the known plan that
   explains them all, and on normal numbers the nearest one and the backward pass.
3. In a cell `tiebreak.matrix.attribution` and `backward_attribution` try what was found first, and all others only
   where it does not have the bits. The checks of accuracy and of gradients hold the kernel to what has them.
4. `identify` climbs on from the known plans, change by change, to a plan that need not be known: the command of that
   name, and the cell `identity` where no known plan explains the designed inputs.
5. At the end of a run `tiebreak.matrix.explain` has one answer for each kernel, which tables and verdicts read: what
   `identify` came to, or else the candidate with most bits in all cells.
"""
