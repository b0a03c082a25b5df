"""Tiers: where bytes of chunks are kept. Each module is imported by name; the disk tier needs the ``disk`` extra."""
