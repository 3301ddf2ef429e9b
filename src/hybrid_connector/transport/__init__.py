"""How bytes move between two engines. Needs numpy; only ``transport.nixl`` needs NIXL, and nothing here needs vLLM."""
