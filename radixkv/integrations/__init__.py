"""Engines on radixkv's pages. Each module needs the packages of its engine: extra [models] for transformers."""
