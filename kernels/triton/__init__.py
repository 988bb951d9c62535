"""Fused and unfused attention in Triton, compiled for a GPU or interpreted on a CPU. Importing it imports no triton."""
