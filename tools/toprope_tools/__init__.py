"""The tools that an agent can call, by concern."""
