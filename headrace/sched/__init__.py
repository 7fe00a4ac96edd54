"""Decides what each step computes. numpy only: nothing here may import torch or know of layers."""
