"""Settings that all tests share."""

from hypothesis import settings

# The same examples in every run, and no limit on the time of one: the machines differ.
settings.register_profile("headrace", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("headrace")
