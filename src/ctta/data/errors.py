"""The one error of this package, and how to get what downloads need."""

MISSING_EXTRA = "downloads need the extra 'data': pip install 'ctta[data]'"


class DownloadError(OSError):
    """A file that could not be fetched, verified or unpacked; the message says what to do."""
