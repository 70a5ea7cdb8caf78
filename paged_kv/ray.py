"""Several servers behind one address: `serve run paged_kv.ray:app model=MODEL num_replicas=4`.

See docs/distributed.md. It needs the extra `ray`.
"""

from paged_kv.extras import extra_module

app = extra_module("paged_kv.server.replicas.deployments", "ray").app
