"""Looking after a store: what may go, whether all is whole, what two nodes have in common."""
