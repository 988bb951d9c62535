"""Leaves the rooms that only a checkout uses out of the wheel; all else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

CHECKOUT_ONLY = ("tiebreak.defects", "tiebreak.laboratory", "tiebreak.studies")


class ShippedPackages(build_py):
    """What a wheel has. An editable install keeps all packages: its import hook knows those that are listed."""

    def finalize_options(self) -> None:
        """Leave out what is not shipped."""
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [name for name in self.packages or [] if not name.startswith(CHECKOUT_ONLY)]


class ShippedPlugIns(egg_info):
    """What a wheel registers. A checkout reads its own pyproject.toml (kernels/public/plugins.py)."""

    def finalize_options(self) -> None:
        """Leave out what leads to modules that are not shipped."""
        super().finalize_options()
        self.distribution.entry_points = {
            group: [entry for entry in entries if not entry.partition("=")[2].strip().startswith(CHECKOUT_ONLY)]
            for group, entries in (self.distribution.entry_points or {}).items()
        }


setup(cmdclass={"build_py": ShippedPackages, "egg_info": ShippedPlugIns})
