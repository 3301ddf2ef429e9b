"""What peers say to each other. Standard library, msgspec and pyzmq only."""
