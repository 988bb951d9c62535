"""Sweeps: the store of training runs over seeds and learning rates, and its tables."""
