"""One file a family, over the layers. base.py has what all share, registry.py finds the class."""
