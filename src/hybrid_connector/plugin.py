"""The entry point that vLLM calls in every process: makes the connector's name known, and its log part of vLLM's."""

import logging

CONNECTOR_NAME = "HybridNixlConnector"


def register() -> None:
    """Register the connector with vLLM's factory; calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # The factory raises on a second registration, and plugins load more than once in forked processes.
    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "hybrid_connector.connector", CONNECTOR_NAME)
    _share_log(logging.getLogger("vllm"), logging.getLogger("hybrid_connector"))


def _share_log(theirs: logging.Logger, ours: logging.Logger) -> None:
    """Log as vLLM does: it sets up its own logger only, and others keep to warnings without a time or a process."""
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
