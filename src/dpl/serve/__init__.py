"""Serving: many streams of images over HTTP, each with its own adapted model.

This module and `client` import no web framework. Everything else here needs the extra `serve`, and `ray` also the extra
`ray`. Nothing here implements adaptation; that is the model's.
"""

from typing import TYPE_CHECKING, Any

from dpl.core.extras import optional

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["create_app"]


def create_app(*args: Any, **kwargs: Any) -> "FastAPI":
    """Return the web application; the arguments are those of `dpl.serve.server.Server`."""
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        optional(module, "serve")
    from dpl.serve.app import make_app
    from dpl.serve.server import Server

    return make_app(Server(*args, **kwargs))
