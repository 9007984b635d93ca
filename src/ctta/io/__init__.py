"""Image files and atomic writes."""
