"""Sessions on their way to another store, and who owns them meanwhile."""
