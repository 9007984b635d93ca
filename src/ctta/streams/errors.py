"""The one error of readers."""


class DataError(ValueError):
    """Data on disk that is missing, truncated or of another kind; says which file, and what to do."""
