"""Device memory by tag, its books, and the tool that names what keeps it alive."""
