"""The entry point that vLLM calls in every process: makes the connector's name known, and its log part of vLLM's."""

import logging

CONNECTOR_NAME = "HybridNixlConnector"


def register() -> None:
    """Register the connector with vLLM's factory; calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # The factory raises on a second registration, and plugins load more than once in forked processes.
    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "hybrid_connector.connector", CONNECTOR_NAME)
    # vLLM sets up its own logger only, and anew when an engine starts: others are left with warnings that have neither
    # a time nor a process. As a child of vLLM's, ours is set up with it.
    logging.getLogger("hybrid_connector").parent = logging.getLogger("vllm")
