"""A client of `dpl serve`; it imports only the standard library."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpl.core.errors import DplError, InputError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Client", "ServeError", "StreamClient"]

Images = Sequence[str | PathLike[str] | bytes]
_LONGEST_WAIT = 30.0


class ServeError(DplError):
    """An error response; `status` is the HTTP status, or 0 if there was no response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status


class Client:
    """A connection to a server; it retries a request that is refused because of load (429, 503)."""

    def __init__(
        self, url: str = "http://127.0.0.1:8000", token: str | None = None, timeout: float = 60.0, retries: int = 3
    ) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InputError(f"url {url!r}: expected http:// or https://")
        self._url, self._timeout, self._retries = url.rstrip("/"), timeout, retries
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def stream(self, name: str) -> "StreamClient":
        """Return the stream called `name`; the server creates it at its first prediction."""
        return StreamClient(self, name)

    def streams(self) -> list[dict[str, Any]]:
        """Return the status of the streams, most recently used first."""
        return list(self.request("GET", "/v1/streams")["streams"])

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Send one request and return its JSON response; retry it while the server is overloaded."""
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self._url + path, data=body, method=method, headers={**self._headers, **(headers or {})}
        )
        retries = self._retries
        while True:
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as response:  # noqa: S310
                    return json.load(response)  # type: ignore[no-any-return]
            except urllib.error.HTTPError as error:
                if error.code not in (429, 503) or retries <= 0:
                    raise ServeError(error.code, _message(error)) from None
                retries -= 1
                time.sleep(min(_LONGEST_WAIT, float(error.headers.get("Retry-After", "1"))))
            except urllib.error.URLError as error:
                raise ServeError(0, f"{self._url}: {error.reason}") from error


class StreamClient:
    """One stream of a server."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name
        self._path = f"/v1/streams/{urllib.parse.quote(name, safe='')}"

    def predict(
        self, images: "Images | np.ndarray[Any, Any]", *, adapt: str = "auto", top: int = 1, probabilities: bool = False
    ) -> dict[str, Any]:
        """Predict image files (paths or their bytes) or an array [N, 3, H, W] of values in 0..1, and adapt to them."""
        query = urllib.parse.urlencode({"adapt": adapt, "top": top, "probabilities": str(probabilities).lower()})
        body, headers = _encoded(images)
        return self._client.request("POST", f"{self._path}/predict?{query}", body, headers)

    def status(self) -> dict[str, Any]:
        """Return the status of the stream."""
        return self._client.request("GET", self._path)

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """Return the events after the job number `after`."""
        return list(self._client.request("GET", f"{self._path}/events?after={after}")["events"])

    def snapshot(self) -> dict[str, Any]:
        """Write a snapshot of the stream to the server's disk."""
        return self._client.request("POST", f"{self._path}/snapshot")

    def rollback(self, to: int | None = None) -> dict[str, Any]:
        """Return to the newest snapshot of an earlier state, or to the one with the number `to`."""
        body = None if to is None else json.dumps({"to": to}).encode()
        return self._client.request("POST", f"{self._path}/rollback", body, {"Content-Type": "application/json"})

    def reset(self) -> dict[str, Any]:
        """Return to the source model."""
        return self._client.request("POST", f"{self._path}/reset")

    def delete(self) -> dict[str, Any]:
        """Delete the stream."""
        return self._client.request("DELETE", self._path)


def _encoded(images: Any) -> tuple[bytes, dict[str, str]]:
    """Return the body with the images, an array or a form of files, and the headers that describe it."""
    if hasattr(images, "astype"):
        headers = {"Content-Type": "application/octet-stream", "X-Shape": ",".join(map(str, images.shape))}
        return images.astype("<f4").tobytes(), headers
    if isinstance(images, (str, bytes, PathLike)):
        raise InputError("images is one file: expected a list of paths or of bytes, or an array")
    boundary, body = uuid.uuid4().hex, bytearray()
    for i, image in enumerate(images):
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="images"; filename="{i}"\r\n\r\n'
        body += head.encode() + data + b"\r\n"
    body += f"--{boundary}--\r\n".encode()
    return bytes(body), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)
