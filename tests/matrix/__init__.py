"""The cells: every backend x kernel x case x format, run under pytest."""
