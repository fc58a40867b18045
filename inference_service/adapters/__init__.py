"""The adapter process: from a reference to a packed blob in host memory.

resolution.py       what the registry says a reference means
registry_client.py  asks the registry, remembers its answers (the only file here that knows gRPC)
disk_cache.py       verified adapter folders on disk, by digest
fetcher.py          downloads an adapter from its pinned sources into the disk cache
packer.py           adapter files → one blob as it lies on the device   (conversion.py: dtypes)
store.py            which blobs lie where in the host arena             (host_arena.py)
flights.py          one attempt at a time per key, failures remembered for a moment
loader.py           all of the above in order: resolve, fetch, stage     (counters.py: how often, how long, how far)
process.py          the process around it; client.py: how an API process talks to it
"""
