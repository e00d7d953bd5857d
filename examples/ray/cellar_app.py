"""Ray Serve over `cellar serve`: each replica is a process of its own, and answers stream through.

    serve run cellar_app:app        # CELLAR is the program, CELLAR_FLAGS what it is started with
"""

import os
import shlex
import socket
import subprocess
import time

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse


@serve.deployment(num_replicas=2, max_ongoing_requests=256, health_check_period_s=1, health_check_timeout_s=3,
                  graceful_shutdown_timeout_s=60)
class Cellar:
    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        flags = ["--port", str(self.port), "--max-client-connections", "0"]
        flags += shlex.split(os.environ.get("CELLAR_FLAGS", ""))
        self.program = subprocess.Popen([os.environ.get("CELLAR", "cellar"), "serve", *flags])
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=None)
        # Loading a model takes what it takes.
        while self.program.poll() is None and not self.is_ready():
            time.sleep(0.1)
        self.check_health()

    def is_ready(self):
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def check_health(self):
        """Ray asks each second, and starts another replica where this raises."""
        if self.program.poll() is not None:
            raise RuntimeError(f"cellar ended with {self.program.returncode}")

    async def __call__(self, request: Request):
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        kept = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        try:
            sent = self.client.build_request(request.method, path, content=await request.body(), headers=kept)
            answer = await self.client.send(sent, stream=True)
        except httpx.TransportError as error:  # gone, and not noticed yet: the client may try again
            return JSONResponse({"error": {"message": str(error), "type": "server_error"}}, 503, {"Retry-After": "1"})
        headers = {name: value for name, value in answer.headers.items()
                   if name not in ("content-length", "transfer-encoding", "connection")}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, {**headers, "x-replica": str(self.port)})

    def __del__(self):
        self.program.terminate()  # running requests get --drain seconds


app = Cellar.bind()
