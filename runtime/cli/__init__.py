"""The `serai` command."""
