"""Kernels and elementwise operations: each file has the operation, its reference, and on a CPU its
C source.

The lowest room: it imports nothing of the others.
"""
