"""The command line and what it needs: everything here may import anything below."""
