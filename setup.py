"""Leaves the rooms that only a checkout uses out of the wheel; all else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py

CHECKOUT_ONLY = ("tiebreak.defects", "tiebreak.studies")


class ShippedPackages(build_py):
    """What a wheel has. An editable install keeps all packages: its import hook knows those that are listed."""

    def finalize_options(self) -> None:
        """Leave out what is not shipped."""
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [name for name in self.packages or [] if not name.startswith(CHECKOUT_ONLY)]


setup(cmdclass={"build_py": ShippedPackages})
