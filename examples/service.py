"""An engine with the REST service on its own cache: python examples/service.py [PORT]"""

import sys

import uvicorn

import radixkv
from radixkv.api import ServiceConfig, create_app

layout = radixkv.KVLayout.full(layers=2, kv_heads=2, head_dim=32)
cache = radixkv.open(radixkv.Config(layout, device=radixkv.DeviceConfig(pages=64, kind="none")))

prompt = list(range(100, 140))
with cache.acquire(radixkv.Namespace("my-model"), prompt) as lease:  # a request, of which nothing was cached
    lease.append(len(prompt))
    lease.commit(prompt)

app = create_app(cache, ServiceConfig(token="change-me-please"))
uvicorn.run(app, port=int(sys.argv[1]) if sys.argv[1:] else 8090, log_level="warning")
cache.close()
