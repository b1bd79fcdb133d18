"""Messages about the expiry of a certificate. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

WARN = timedelta(days=14)
"""Before a certificate's end. A day or two of them are enough to replace one by hand, the rest is
for holidays.
"""


def notice(path: str, ends: datetime, now: datetime) -> str:
    """Returns a message if the certificate has expired or expires soon; empty otherwise."""
    date = f"{ends:%Y-%m-%d %H:%M:%S} UTC"
    if now >= ends:
        return (
            f"{path} expired at {date}: open connections continue, and new connections are "
            "refused until it is replaced"
        )
    left = ends - now
    if left > WARN:
        return ""
    if left.days:
        return f"{path} expires in {left.days} days, at {date}"
    return f"{path} expires in {max(1, round(left / timedelta(hours=1)))} hours, at {date}"
