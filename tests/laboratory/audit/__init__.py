"""Kernels compiled for absent GPUs: which instructions round, read from their assembly."""
