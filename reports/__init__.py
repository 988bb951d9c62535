"""Records of runs: kept, tabulated, compared. Imports no torch."""
