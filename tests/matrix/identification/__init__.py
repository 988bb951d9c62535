"""Which rounding plan a kernel follows, from its outputs alone: designed inputs, the space of plans, the search.

What is known lies in `candidates`, `tiebreak.kernels.backward_passes` and `tiebreak.cases.slips`. The core asks as
`tiebreak.matrix.resolver` says. `settling` asks a kernel that declares nothing of designed inputs, before its cells.
Where a known plan explains them all, the cell `identity` goes no further; else, and always for the command of that
name, `identify` climbs, change by change, to a plan that need not be known. In other cells `attribution` and
`backward_attribution` try the known plan first, all else only where it does not have the bits. At the end of a run
`explain` has one answer for each kernel: what `identify` came to, or else the candidate with most bits.
"""
