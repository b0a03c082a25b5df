"""The ``drive`` fixture of the cases, for services over a cache with a manual mover."""

from tests.cases.conftest import Drive, drive

__all__ = ["Drive", "drive"]
