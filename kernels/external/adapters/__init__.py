"""Adapters: attention of packages that people use, each a function of a few lines, imported when used."""
