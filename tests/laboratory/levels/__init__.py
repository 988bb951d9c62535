"""The matrix at each instruction-set level, of this CPU and of emulated ones."""
