"""Whether a connection failed for a certificate that is not trusted: no later try mends that. Both planes ask it."""

from __future__ import annotations

import ssl


def certificate_refused(error: BaseException) -> bool:
    """Looks through what `error` was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
