"""Each module here makes the environments of one ecosystem look like ours: `make(target) -> Environment`."""
