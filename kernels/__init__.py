"""The vocabulary of attention numerics and the algorithms, written once over an arithmetic."""
