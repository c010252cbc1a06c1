"""What gRPC's clients say by themselves, in words for people: connections that break or never come about. Pure.

gRPC's texts change with its versions. One that is not known here is left as it is.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

TIME_IS_UP = "the time was up before the answer was complete"
CONNECTION_ENDED = "the router closed the connection, or has ended"
NO_NAME = "its name is not known"
NOBODY_LISTENS = "nothing listens there; a router may be starting, or have ended"
NO_GRPC = "it does not speak gRPC; an HTTP interface has another port"

_DEADLINE = re.compile(r"(Stream removed \()?Deadline Exceeded\)?")
_ENDED = re.compile(
    r"(Stream removed \()?(Socket closed|recvmsg:.*|Connection reset.*|.*GOAWAY received.*)\)?", re.DOTALL
)
_NO_NAME = re.compile(r"(?:DNS resolution failed for|errors resolving) (?P<name>[^\s:]+(?::\d+)?):.*", re.DOTALL)
_NO_CONNECTION = re.compile(
    r"failed to connect to all addresses; last error: [A-Z_]+: (?:ipv[46]:)?(?P<address>\S+): (?P<why>.*)", re.DOTALL
)
# Why there is none: what the text has in it, and what that means.
_WHY = (
    ("Connection refused", NOBODY_LISTENS),
    ("WRONG_VERSION_NUMBER", "it speaks no TLS, and was called with it, by https:// or with certificates"),
    ("CERTIFICATE_VERIFY_FAILED", "it has a certificate of an authority that is not trusted here"),
    ("Hostname Verification Check failed", "its certificate has another name than it was called by"),
    ("Failed parsing HTTP/2", NO_GRPC),
    (
        "Socket closed",
        "it closed the connection at once, as one with TLS does when it is called in plain text, or without a "
        "certificate that it wants",
    ),
)


def deadline_words(text: str) -> str:
    """gRPC's text of a call whose deadline has passed, or what it means."""
    return TIME_IS_UP if _DEADLINE.fullmatch(text) else text


def connection_words(text: str) -> str | None:
    """What gRPC's text of a call that was unavailable says about the connection; None if nothing that is known."""
    if _ENDED.fullmatch(text):
        return CONNECTION_ENDED
    if (found := _NO_NAME.fullmatch(text)) is not None:
        return f"no connection with {found['name']}: {NO_NAME}"
    if (found := _NO_CONNECTION.fullmatch(text)) is None:
        return None
    why = found["why"].removeprefix("Failed to connect to remote host: ")
    meant = next((words for part, words in _WHY if part in why), why)
    return f"no connection with {unquote(found['address'])}: {meant}"
