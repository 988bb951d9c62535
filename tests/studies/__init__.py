"""Programs that make the pages under docs/: their tables, their figures, and the site."""
