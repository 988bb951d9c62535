"""Audits of compiled kernels: which instructions round, as records and as tables."""
