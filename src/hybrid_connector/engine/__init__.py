"""What the engine sees: the only layer that knows vLLM."""
