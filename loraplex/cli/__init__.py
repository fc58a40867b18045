"""The `loraplex` command line: one file a group of commands."""
