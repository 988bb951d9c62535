"""Records: what a run measured, the file that keeps it, and which of them are read."""
