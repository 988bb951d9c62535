"""The matrix is a pytest plug-in that is loaded with this file."""

pytest_plugins = ("tiebreak.matrix.plugin", "pytester")
