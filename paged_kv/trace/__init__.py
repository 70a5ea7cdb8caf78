"""Records the requests that batches serve, and reads them for `paged_kv.integrations.replay`."""
