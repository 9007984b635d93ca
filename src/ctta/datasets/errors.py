"""The one error of this package, and how to get what downloads need."""

import errno

#: What a full disk says, and a user's full share of one, as home folders on clusters have it.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MISSING_EXTRA = "downloads need the extra 'data': pip install 'ctta[data]'"


class DownloadError(OSError):
    """A file that could not be fetched, verified or unpacked; the message says what to do."""
