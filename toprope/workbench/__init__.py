"""Planning within the owner's limits: the catalog of environments, drafts, and starting runs."""
