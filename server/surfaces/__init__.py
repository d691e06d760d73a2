"""The agent's surface by concern: each file a part of the class `server.surface.Surface`."""
