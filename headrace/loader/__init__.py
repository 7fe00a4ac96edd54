"""Finds a model's files and fills its parameters from them, completely or not at all."""
