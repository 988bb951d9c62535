"""The gate: whether a run is worse than a baseline, how much worse is too much, and what is excused."""
