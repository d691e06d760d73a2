"""The configuration's schema, its dotted fields, the owner's locks and settings."""
