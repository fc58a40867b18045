"""Generated from protos/; see `make stubs`."""
