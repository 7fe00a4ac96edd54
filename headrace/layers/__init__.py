"""The vocabulary that models are written in.

Layers declare what they cache and how ranks share them.
"""
