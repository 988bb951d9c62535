"""Files in, verdict out: the calls of a run as files, and the verdict on the outputs that some device wrote."""
