"""The page: one HTML file of runs, audits and sweeps, its figures and its findings."""
