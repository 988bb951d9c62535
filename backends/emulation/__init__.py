"""Rounding, accumulators and arithmetic in software: what a declared plan predicts, bit for bit."""
