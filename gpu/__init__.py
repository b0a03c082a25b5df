"""Devices: who owns the page tensors.

``reference`` (torch, needs the extra ``torch``), ``planar`` (numpy: the buffer format of the outer tiers).
"""
