"""One rank: the device's state by row, a step's inputs, and the runner that turns a plan into a
result.
"""
