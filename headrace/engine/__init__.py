"""The loop, its clients, and the entry points. Importing this package alone imports nothing."""
