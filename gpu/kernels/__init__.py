"""Triton kernels, one module per operation; the entries in ``radixkv.gpu`` load them when first used.

Every address is a 64-bit integer: pages times elements per page passes 2**31 long before memory is full.
"""
