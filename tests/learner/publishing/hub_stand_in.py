"""A local HTTP server with the part of the hub's API that a push uses, as huggingface_hub 2.4 calls it.

Accounts, repositories, files and commits are in memory. A commit is checked as the hub does: its parent, and that
every large file was uploaded.
"""

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from aiohttp import web

from tests.ports import free_port

HANG_UP, SILENCE = 0, 1
TOKEN, READER = "hf_token_of_me", "hf_token_that_may_only_read"


class Repository:
    """A model repository of one branch."""

    def __init__(self, *, private: bool) -> None:
        self.private = private
        self.files: dict[str, bytes] = {".gitattributes": b""}
        self.commits = ["0" * 40]
        self.summaries: list[str] = []


class HubStandIn:
    """Answers like the hub. `failures` maps the start of `METHOD path` to a status, or to HANG_UP or SILENCE."""

    url = ""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.failures: dict[str, int] = {}
        self.requests: list[str] = []
        self.num_uploads = 0
        self.ended = asyncio.Event()

    @web.middleware
    async def script(self, request: web.Request, handler: Any) -> web.StreamResponse:
        line = f"{request.method} {request.path}"
        self.requests.append(line)
        for start, status in self.failures.items():
            if line.startswith(start):
                if status == SILENCE:
                    await self.ended.wait()
                if status == HANG_UP:
                    assert request.transport is not None
                    request.transport.abort()
                return web.json_response({"error": "as the test wants it"}, status=max(status, 400))
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (TOKEN, READER) and not request.path.startswith("/lfs/"):
            return web.json_response({"error": "Invalid credentials"}, status=401)
        if token == READER and request.method == "POST" and "/api/validate" not in request.path:
            return web.json_response({"error": "You have read access only"}, status=403)
        return await handler(request)

    async def whoami(self, request: web.Request) -> web.Response:
        return web.json_response({"type": "user", "name": "me", "orgs": []})

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != "me":
            return web.json_response({"error": "You don't have the rights to create a model there"}, status=403)
        if name in self.repositories:
            return web.json_response({"error": "exists", "url": f"{self.url}/{name}"}, status=409)
        self.repositories[name] = Repository(private=asked.get("visibility") == "private")
        return web.json_response({"url": f"{self.url}/{name}"})

    def _repository(self, request: web.Request) -> Repository:
        name = f"{request.match_info['owner']}/{request.match_info['name']}"
        if name not in self.repositories:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        return self.repositories[name]

    async def info(self, request: web.Request) -> web.Response:
        found = self._repository(request)
        name = request.path.removeprefix("/api/models/").removesuffix("/revision/main")
        siblings = [{"rfilename": file} for file in found.files]
        return web.json_response({"id": name, "sha": found.commits[-1], "private": found.private, "siblings": siblings})

    async def validate(self, request: web.Request) -> web.Response:
        content = (await request.json())["content"]
        try:
            metadata = yaml.safe_load(content.split("---")[1])
            assert isinstance(metadata, dict)
        except (yaml.YAMLError, IndexError, AssertionError) as error:
            return web.json_response({"errors": [{"message": str(error)}], "warnings": []}, status=400)
        return web.json_response({"errors": [], "warnings": []})

    async def preupload(self, request: web.Request) -> web.Response:
        found = self._repository(request)
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if _is_large(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": _id_of(file["path"], found.files[file["path"]]) if file["path"] in found.files else None,
            }
            for file in (await request.json())["files"]
        ]
        return web.json_response({"files": modes})

    async def batch(self, request: web.Request) -> web.Response:
        objects = []
        for asked in (await request.json())["objects"]:
            upload = {"href": f"{self.url}/lfs/{asked['oid']}", "header": {}}
            objects.append(asked if asked["oid"] in self.large_files else asked | {"actions": {"upload": upload}})
        return web.json_response({"transfer": "basic", "objects": objects})

    async def upload(self, request: web.Request) -> web.Response:
        content, oid = await request.read(), request.match_info["oid"]
        assert hashlib.sha256(content).hexdigest() == oid
        self.large_files[oid] = content
        self.num_uploads += 1
        return web.Response()

    async def commit(self, request: web.Request) -> web.Response:
        found = self._repository(request)
        header, *operations = [json.loads(line) for line in (await request.text()).splitlines()]
        if header["value"].get("parentCommit") not in (None, found.commits[-1]):
            return web.json_response({"error": "the parent is not the newest commit"}, status=412)
        files = dict(found.files)
        for operation in operations:
            value = operation["value"]
            match operation["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.large_files[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        found.files = files
        found.commits.append(hashlib.sha1(json.dumps(operations).encode()).hexdigest())
        found.summaries.append(header["value"]["summary"])
        where = f"{self.url}/{request.match_info['owner']}/{request.match_info['name']}/commit/{found.commits[-1]}"
        return web.json_response({"commitUrl": where, "commitOid": found.commits[-1]})


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _id_of(path: str, content: bytes) -> str:
    """Return what tells whether a file has changed: its SHA-256, or git's hash of a small file."""
    if _is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    hub, loop, ready = HubStandIn(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        app = web.Application(middlewares=[hub.script], client_max_size=1 << 28)
        model = "/api/models/{owner}/{name}"
        app.add_routes(
            [
                web.get("/api/whoami-v2", hub.whoami),
                web.post("/api/repos/create", hub.create),
                web.get(model, hub.info),
                web.get(f"{model}/revision/main", hub.info),
                web.post("/api/validate-yaml", hub.validate),
                web.post(f"{model}/preupload/main", hub.preupload),
                web.post(f"{model}/commit/main", hub.commit),
                web.post("/{owner}/{name}.git/info/lfs/objects/batch", hub.batch),
                web.put("/lfs/{oid}", hub.upload),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        hub.url = f"http://127.0.0.1:{port}"
        ready.set()
        await hub.ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(hub.ended.set)
        thread.join(30)
        loop.close()
