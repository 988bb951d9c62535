"""Inputs, what is claimed about them, and how outputs are measured and judged."""
