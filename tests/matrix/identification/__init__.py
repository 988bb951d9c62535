"""Which rounding plan a kernel follows, from its outputs alone: designed inputs, the space of plans, the search.

What is known lies in `tiebreak.matrix.candidates`, `tiebreak.kernels.backward_passes` and `tiebreak.cases.slips`.
`identify` asks a kernel that declares nothing of designed inputs. Where a known plan explains them all, the cell
`identity`, which comes first, goes no further; else, and always for the command of that name, it climbs, change by
change, to a plan that need not be known. `known` keeps what it found. In other cells `tiebreak.matrix.attribution` and
`backward_attribution` try that first, all else only where it does not have the bits. At the end of a run
`tiebreak.matrix.explain` has one answer for each kernel: what `identify` came to, or else the candidate with most bits.
"""
