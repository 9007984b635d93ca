"""What a client is told where its request cannot be served."""


class Refusal(Exception):
    """An answer that is no success.

    Args:
        status: of HTTP.
        reason: one sentence that says what to do.
        retry_after: seconds after which the same request may succeed, if it may.
    """

    def __init__(self, status: int, reason: str, *, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after
