"""Tokenizers and chat templates that adapters bring: a tenant's code, run in processes that can be ended.

A request's way: `servicer` → `texts` (which text belongs to an adapter) → `text` → `sandbox` (a few workers, one call
of an adapter at a time) → `process` → *process boundary* → `worker` → `loaded`.
"""
