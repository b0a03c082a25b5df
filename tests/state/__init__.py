"""Hypothesis state machines over the pool, the tree and the whole cache."""
