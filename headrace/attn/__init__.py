"""Attention backends, one instance for each KV group, behind the interface in base.py."""
