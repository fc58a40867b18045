"""The registry: names, immutable versions and aliases of adapters, kept in a SQL database and served over gRPC."""
