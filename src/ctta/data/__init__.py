"""What can be adapted to, and in which order: corruptions, datasets, drawn streets and streams."""
