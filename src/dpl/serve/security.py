"""Who may ask, for which streams, from where."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpl.core.errors import InputError, SettingError

__all__ = ["OPEN", "Access", "Tokens", "check_stream_id", "is_loopback", "require_token", "same_site"]

_STREAM_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHORTEST_TOKEN = 16
_LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class Access:
    """What a caller may see: the streams whose name starts with `prefix`; with an empty one, everything."""

    prefix: str = ""

    def allows(self, stream_id: str) -> bool:
        """Say whether a stream belongs to the caller."""
        return stream_id.startswith(self.prefix)


OPEN = Access()


class Tokens:
    """The accepted bearer tokens, kept as hashes."""

    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        if not tokens:
            raise SettingError("no token given: expected at least one")
        for token, _ in tokens:
            if len(token) < _SHORTEST_TOKEN:
                raise SettingError(f"a token has {len(token)} characters: expected at least {_SHORTEST_TOKEN}")
        self._known = [(_digest(token), Access(prefix)) for token, prefix in tokens]

    @classmethod
    def from_file(cls, path: Path) -> "Tokens":
        """Read `TOKEN [STREAM_PREFIX]` lines; empty ones and those that start with # do not count."""
        expected = f"{path}: expected lines of the form TOKEN [STREAM_PREFIX]"
        try:
            text = path.read_text()
        except UnicodeDecodeError as error:
            raise SettingError(f"{expected}, not a binary file") from error
        lines = [line.split() for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
        if not lines or any(len(words) > 2 for words in lines):
            raise SettingError(expected)
        return cls([(words[0], words[1] if len(words) == 2 else "") for words in lines])

    def access(self, header: str) -> Access | None:
        """Return what an Authorization header opens, or None; the time taken does not depend on how near it came."""
        scheme, _, token = header.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, access in self._known:
            if hmac.compare_digest(digest, given):
                found = access
        return found if scheme.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Say whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_token(host: str, tokens: Tokens | None) -> None:
    """Refuse to serve other machines without a token."""
    if tokens is None and not is_loopback(host):
        raise SettingError(
            f"--host {host} can be reached from other machines: give --token-file FILE (a line of at least "
            f"{_SHORTEST_TOKEN} characters), or serve on 127.0.0.1"
        )


def same_site(host: str, origin: str | None) -> bool:
    """Say whether a request to a server without tokens comes from this machine's own doing.

    A web page of another site can make a browser send requests here, also under a name of its own that it lets point
    to this address. The first has a foreign Origin, the second a foreign Host.
    """
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    return name.strip("[]") in _LOCAL_NAMES and (origin is None or origin.split("://", 1)[-1] == host)


def check_stream_id(stream_id: str) -> str:
    """Return a valid stream name, or raise; it becomes the name of a folder."""
    if not _STREAM_ID.fullmatch(stream_id):
        raise InputError(
            f"stream {stream_id[:100]!r}: expected 1 to 100 letters, digits, '.', '_' or '-', "
            "the first and last a letter or digit"
        )
    return stream_id


def valid_request_id(given: str | None) -> bool:
    """Say whether a caller's own request id can be used."""
    return given is not None and _REQUEST_ID.fullmatch(given) is not None
