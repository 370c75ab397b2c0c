"""The demo page: one file, with a content security policy that lets nothing but its own script run."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response

_BLOCK = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_response() -> Response:
    """The page and its headers."""
    html, policy = _page()
    return Response(
        html,
        media_type="text/html",
        headers={
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "permissions-policy": "camera=(), microphone=(), geolocation=()",
        },
    )


@cache
def _page() -> tuple[str, str]:
    html = files("habitus.serving").joinpath("page.html").read_text(encoding="utf-8")
    hashes = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for kind, text in _BLOCK.findall(html)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return html, policy
