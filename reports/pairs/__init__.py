"""Pairs: two kernels, or one on two machines, held against each other."""
