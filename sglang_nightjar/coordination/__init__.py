"""Agreement between the ranks of one server."""
