"""A call compared with itself under one change: the knobs, and whether other bits come with a bias."""
