"""The processes that work together: ranks, gathering, failing together."""
