"""Behavioural cases, one test per id: A wrong KV, B leaks, C hangs, D crash and disk, E concurrency, F edges, G abuse,
H metrics."""
