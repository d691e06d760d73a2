"""The agent's surface by concern: each file a part of the class `toprope_server.mcp.tool_registry.Surface`."""
