"""Serving: many streams of images over HTTP, each with a model that adapts to it and to it alone.

The parts that need the web framework are imported when `create_app` is called; it comes with the extra `serve`.
"""

from typing import TYPE_CHECKING, Any

from dpl.core.extras import optional

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["create_app"]


def create_app(*args: Any, **kwargs: Any) -> "FastAPI":
    """Return the web application; arguments are those of `dpl.serve.server.open_server`."""
    for module in ("fastapi", "prometheus_client", "python_multipart"):
        optional(module, "serve")
    from dpl.serve.app import make_app
    from dpl.serve.server import open_server

    return make_app(open_server(*args, **kwargs))
