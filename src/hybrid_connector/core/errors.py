"""What can go wrong, as one tree.

HybridConnectorError
├── ConfigError           the operator wrote something this connector cannot use
├── UnsupportedError      this engine uses a feature whose state cannot be moved yet
├── IncompatibleError     two engines cannot exchange state; names the tensor and both values
├── WireError             bytes from outside that are no message of this protocol
├── PeerError             a peer that does not answer, or answers something else than it was asked
└── TransferError         a read that did not end well
"""


class HybridConnectorError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(HybridConnectorError, ValueError):
    """A value in ``kv_transfer_config`` or the environment is unusable; says what was expected."""


class UnsupportedError(HybridConnectorError, ValueError):
    """This engine's configuration cannot be served; names the feature."""


class IncompatibleError(HybridConnectorError):
    """P and D cannot exchange state; names what differs and both values."""


class WireError(HybridConnectorError):
    """Bytes that do not decode to a message of this protocol."""


class PeerError(HybridConnectorError):
    """A peer did not answer in time, or answered out of turn."""


class TransferError(HybridConnectorError):
    """A read could not be posted or ended with an error."""
