"""What an agent plans and an owner allows: the catalog of environments, drafts, freezing."""
