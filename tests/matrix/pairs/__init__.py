"""Pairs: two kernels on the same inputs, what separates them, and how far apart they are in log-probabilities."""
