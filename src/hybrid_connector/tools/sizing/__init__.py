"""How many requests fit into the cache of an engine, and what decides it?"""
