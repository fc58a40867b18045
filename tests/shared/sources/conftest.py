from tests.shared.sources.store_fixtures import hub, s3, s3_url, store, web

__all__ = ["hub", "s3", "s3_url", "store", "web"]
