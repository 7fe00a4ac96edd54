"""Checks of the project's own sources. Run by `make lint`; they import nothing of headrace."""
