"""Kernels compiled for GPUs that nobody here owns: which instructions round, read from their assembly."""
