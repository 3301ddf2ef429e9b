"""What must move between two engines. Standard library only."""
