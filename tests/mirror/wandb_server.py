"""As much of a W&B server as one run needs: it keeps the history rows and says at a resume where they ended."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Listens on a free port; `runs` holds the uploaded history lines of each run id by their offset."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, dict[int, str]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def history(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in sorted(self.runs.get(run, {}).items())]

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            entity = {"id": "e", "name": "somebody"}
            project = {"id": "p", "name": variables["project"], "entity": entity}
            bucket = {"id": "b", "name": variables["name"], "displayName": "", "config": "{}", "project": project,
                      "sweepName": None, "historyLineCount": 0}  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            kept = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": kept}}
        if "RunResumeStatus" in query:
            return {"model": {"id": "p", "name": "p", "entity": None, "bucket": self.resumed(variables["name"])}}
        return {"viewer": {"id": "u", "entity": "somebody", "username": "u", "flags": "{}", "teams": {"edges": []}}}

    def resumed(self, run: str) -> dict[str, Any] | None:
        if run not in self.runs:
            return None
        lines = self.runs[run]
        return {
            "id": "b", "name": run, "displayName": "", "summaryMetrics": "{}", "logLineCount": 0, "eventsLineCount": 0,
            "historyLineCount": len(lines), "historyTail": json.dumps([lines[max(lines)]] if lines else []),
            "eventsTail": "[]", "config": "{}", "tags": [], "notes": "", "wandbConfig": '{"t": 1}',
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        if self.path == "/graphql":
            asked = json.loads(body)
            self.reply({"data": self.server.answer(asked["query"], asked.get("variables") or {})})
            return
        if self.path.endswith("/file_stream"):
            kept = self.server.runs.setdefault(self.path.split("/")[-2], {})
            chunk = (json.loads(body).get("files") or {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            kept |= dict(enumerate(chunk["content"], chunk["offset"]))
        self.reply({})

    do_PUT = do_POST

    def reply(self, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
