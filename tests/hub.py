"""An imitation of the Hugging Face Hub on the loopback address, for its real clients.

Every repository has the branch main, the tag v1 and one commit.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

COMMIT = "c0ffee" + 34 * "0"


class Hub(ThreadingHTTPServer):
    """Serves repositories until the process ends, beginning with its construction.

    `repositories` has the files of each, as {"datasets/owner/name": {path: text}} or,
    for a model, {"owner/name": {path: text}}. A repository in `faults` answers with a
    status and the hub's code for it.
    """

    daemon_threads = True

    def __init__(
        self,
        repositories: dict[str, dict[str, str]],
        faults: dict[str, tuple[int, str]],
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.faults = repositories, faults
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        name, action, revision, file = re.fullmatch(
            r"/(?:api/)?(?:models/)?((?:datasets/)?\w+/\w+)"
            r"(?:/(\w+)/([^/]+)(?:/(.+))?)?|.*",
            path,
        ).groups()
        files = self.server.repositories.get(name)
        if name in self.server.faults:
            self.reply(*self.server.faults[name])
        elif files is None:
            self.reply(404, "RepoNotFound")
        elif revision not in (None, "main", "v1", COMMIT):
            self.reply(404, "RevisionNotFound")
        elif action == "resolve" and file in files:
            self.reply(200, "", files[file])
        elif action == "resolve" or file:
            self.reply(404, "EntryNotFound")
        elif action == "tree":
            entries = [
                {"type": "file", "oid": "0", "size": len(text), "path": path}
                for path, text in files.items()
            ]
            self.reply(200, "", json.dumps(entries))
        else:
            siblings = [{"rfilename": path} for path in files]
            information = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": []}
            self.reply(200, "", json.dumps(information))

    do_HEAD = do_GET

    def reply(self, status: int, code: str, content: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content.encode())))
        self.send_header("ETag", f'"{hash(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content.encode())

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""
