"""Who may read what: health and metrics everybody, as probes and Prometheus need them; page and API with a token.

On a loopback address no token is needed; elsewhere page and API are off without one.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress

from evenroute.dist.web.server import HttpAnswer, HttpRequest, plain

_OFF = (
    "the page and its API are off: this address can be reached by others and there is no token; give one with "
    "--http-token FILE (evenroute keygen makes one), or bind a loopback address and come through ssh -L"
)


def refusal(request: HttpRequest, *, token: str, is_local: bool) -> HttpAnswer | None:
    """Why this request is not answered; None when it is."""
    if not token:
        if not is_local:
            return plain(403, _OFF)
        if not _names_this_host(request):  # a foreign web page whose name was pointed here
            return plain(403, "the page is served as localhost or by address, not under this name")
        return None
    if hmac.compare_digest(_given(request).encode(), token.encode()):
        return None
    challenge = 'Basic realm="evenroute: any name, and the token as password", charset="UTF-8"'
    return plain(
        401,
        "the token is needed: as password, or as Authorization: Bearer",
        **{"WWW-Authenticate": challenge},
    )


def _given(request: HttpRequest) -> str:
    kind, _, value = (request.headers.get("Authorization") or "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _names_this_host(request: HttpRequest) -> bool:
    host = request.headers.get("Host")
    if host is None:
        return True
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
