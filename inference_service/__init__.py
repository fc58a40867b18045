"""The inference service: API processes, one adapter process and one engine process, started by a supervisor."""
