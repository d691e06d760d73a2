"""What an agent can call, one file a concern."""
