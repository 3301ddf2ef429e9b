"""How do engines that share a secret keep strangers out of the side channel?

1. ``load_secret`` reads the secret from the environment or a file.
2. ``Security.from_secret`` derives one CURVE key pair for all servers and one for all clients.
3. A stranger knows neither the server's public key, without which no handshake succeeds, nor the client's secret
   key, which is the only one a server accepts.
libzmq does the cryptography on the wire.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from hybrid_connector.core.errors import ConfigError

SECRET_VARIABLE = "HYBRID_CONNECTOR_SECRET"
SECRET_FILE_VARIABLE = "HYBRID_CONNECTOR_SECRET_FILE"
MIN_SECRET_BYTES = 16
_SALT = b"hybrid-connector side channel v1"


@dataclass(frozen=True, slots=True)
class Security:
    """CURVE keys in Z85, 40 characters each; they are left out of the repr."""

    server_public: bytes = field(repr=False)
    server_secret: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)

    @classmethod
    def from_secret(cls, secret: str | bytes) -> "Security":
        """Derive the keys with scrypt (RFC 7914; N 2**14, r 8, p 1: about 50 ms and 16 MiB).

        Raises ``ConfigError`` where ``secret`` is shorter than 16 bytes, or libzmq was built without CURVE. The salt
        is fixed because all engines must derive the same keys, so only the secret's length stops guessing.
        """
        secret = secret.encode("utf-8", "surrogateescape") if isinstance(secret, str) else secret
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the side channel's secret: expected at least {MIN_SECRET_BYTES} bytes, got {len(secret)}"
            )
        if not zmq.has("curve"):
            raise ConfigError("the side channel's secret needs libzmq with CURVE, this one was built without")
        keys = hashlib.scrypt(secret, salt=_SALT, n=2**14, r=8, p=1, dklen=64)
        server_secret, client_secret = z85.encode(keys[:32]), z85.encode(keys[32:])
        return cls(zmq.curve_public(server_secret), server_secret, zmq.curve_public(client_secret), client_secret)

    def protect_server(self, socket: "zmq.Socket[bytes]") -> None:
        """Make ``socket`` ask the ZAP handler of its context about every client; call before ``bind``."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"hybrid-connector")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def protect_client(self, socket: "zmq.Socket[bytes]") -> None:
        """Make ``socket`` talk to servers with the same secret only; call before ``connect``."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret)

    def judge(self, question: list[bytes]) -> tuple[list[bytes], bool]:
        """The answer to a ZAP question (RFC 27), and whether it lets the client in.

        Frames of a question: version, request id, domain, address, routing id, mechanism, client's public key.
        """
        accepted = question[5:] == [b"CURVE", z85.decode(self.client_public)]
        status = [b"200", b"OK"] if accepted else [b"400", b"not a client of this server"]
        return [b"1.0", *question[1:2], *status, b"", b""], accepted


def load_secret(environ: Mapping[str, str]) -> bytes | None:
    """The secret that ``HYBRID_CONNECTOR_SECRET`` holds or the file named by ``HYBRID_CONNECTOR_SECRET_FILE``.

    ``None`` where neither is set; white space around a file's content is not part of it. Raises ``ConfigError`` where
    both are set, the file cannot be read, or the secret is empty.
    """
    text, name = environ.get(SECRET_VARIABLE), environ.get(SECRET_FILE_VARIABLE)
    if text is not None and name is not None:
        raise ConfigError(f"expected {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}, both are set")
    if name is not None:
        try:
            secret = Path(name).read_bytes().strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{SECRET_FILE_VARIABLE}={name}: expected a readable file: {error}") from error
        if not secret:
            raise ConfigError(f"{SECRET_FILE_VARIABLE}={name}: expected a secret, the file is empty")
        return secret
    if text == "":
        raise ConfigError(f"{SECRET_VARIABLE}: expected a secret, got an empty text")
    return None if text is None else text.encode("utf-8", "surrogateescape")
