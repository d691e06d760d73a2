"""One module a subject: a table for people, and as its last line one JSON object."""
