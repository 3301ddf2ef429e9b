"""Moves the cache state of hybrid models from prefill engines to decode engines over NIXL."""

__version__ = "0.1.0"
