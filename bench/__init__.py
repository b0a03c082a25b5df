"""Measurements: ``make bench`` runs them all, ``python -m bench.NAME`` one. Results that a text quotes go to LOG.md."""
