"""Tool definitions by concern: the names, texts, parameters and hints that an agent sees."""
