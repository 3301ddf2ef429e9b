"""How do the schedulers of two engines reach each other?

D's ``SideChannelClient`` calls P's ``SideChannelServer`` over ZeroMQ. A message is two frames, a call id of 8 bytes
and a payload (``wire.messages``); the reply repeats the call id. With a shared secret both ends use CURVE
(``wire.security``).
"""

from hybrid_connector.wire.client import SideChannelClient
from hybrid_connector.wire.security import Security, load_secret
from hybrid_connector.wire.server import Limits, SideChannelServer
from hybrid_connector.wire.sockets import Address

__all__ = ["Address", "Limits", "Security", "SideChannelClient", "SideChannelServer", "load_secret"]
