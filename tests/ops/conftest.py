"""Triton is made for Linux only."""

import sys

collect_ignore = [] if sys.platform == "linux" else ["test_triton.py"]
