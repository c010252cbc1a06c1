"""How an API key travels: as metadata of each call, ``authorization: Bearer KEY``."""

from __future__ import annotations

AUTHORIZATION = "authorization"
SCHEME = "Bearer"
MAX_KEY_CHARS = 512


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that say whose it is; none without a key.

    Raises ValueError for what cannot be sent; the message does not show it.
    """
    if not api_key:
        return ()
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key or len(api_key) > MAX_KEY_CHARS:
        raise ValueError(f"an API key has at most {MAX_KEY_CHARS} printable ASCII characters, and no spaces")
    return ((AUTHORIZATION, f"{SCHEME} {api_key}"),)
