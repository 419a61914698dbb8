"""A local HTTP server that answers as the Hub does, for the real `datasets` and `huggingface_hub` clients.

    with HubStub() as hub:
        hub.add("owner/name", {"README.md": b"...", "data/a.parquet": b"..."})
        ... a subprocess with HF_ENDPOINT=hub.url and HF_HOME=an empty folder ...

Misbehaviour is asked for by path: `cut` closes the connection in the middle of the next so many answers, `stalled`
leaves it open there, `spoilt` serves other bytes of the same length, `dead` paths have their connections closed
unanswered, `down` has all of them, `mute` leaves all of them open unanswered, and `dies_at` sets one of these two
when a path is asked for.
"""

import hashlib
import re
import threading

from tests.local_server import Handler, Server

Files = dict[str, bytes]


class HubStub(Server):
    def __init__(self):
        super().__init__(_Handler)
        self.repos: dict[str, dict[str, Files]] = {}  # repository -> commit -> path -> content
        self.cut: dict[str, int] = {}
        self.stalled: set[str] = set()
        self.spoilt: set[str] = set()
        self.dead: set[str] = set()
        self.down = self.mute = False
        self.dies_at: dict[str, str] = {}  # path -> "down" or "mute"
        self.closed = threading.Event()
        self.log: list[tuple[str, str, str]] = []  # method, path, range

    def add(self, repo: str, files: Files, commit: str | None = None) -> str:
        """Add a commit, which becomes `main`; return its hash."""
        commit = (
            commit
            or hashlib.sha1(b"".join(path.encode() + files[path] for path in sorted(files))).hexdigest()
        )
        self.repos.setdefault(repo, {})[commit] = files
        return commit

    def fetched(self) -> list[str]:
        """The parquet files that were asked for, each once, in order."""
        paths = [
            path.split("/", 6)[-1] for method, path, _ in self.log if method == "GET" and ".parquet" in path
        ]
        return list(dict.fromkeys(paths))

    def leave(self):
        self.closed.set()
        super().leave()


class _Handler(Handler):
    server: HubStub

    def do_GET(self):
        self._answer()

    def do_HEAD(self):
        self._answer()

    def _answer(self):
        hub, path = self.server, self.path.split("?")[0]
        hub.log.append((self.command, path, self.headers.get("Range", "")))
        for name, how in hub.dies_at.items():
            if path.endswith(name):
                setattr(hub, how, True)
        if hub.mute:
            hub.closed.wait()
        if hub.mute or hub.down or any(path.endswith(name) for name in hub.dead):
            self.close_connection = True
            return
        if match := re.fullmatch(r"/datasets/(.+?)/resolve/([^/]+)/(.+)", path):
            repo, revision, name = match.groups()
            self._file(repo, revision, name.replace("%2F", "/"))
        elif match := re.fullmatch(r"/api/datasets/(.+?)(?:/(revision|tree)/([^/]+)(?:/(.+))?)?", path):
            repo, kind, revision, folder = match.groups()
            self._describe(repo, kind, revision or "main", folder or "")
        else:
            self._missing("EntryNotFound")

    def _commit(self, repo: str, revision: str) -> str | None:
        commits = self.server.repos.get(repo)
        if commits is None:
            self._missing("RepoNotFound")
            return None
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            self._missing("RevisionNotFound")
            return None
        return commit

    def _describe(self, repo: str, kind: str, revision: str, folder: str):
        if not (commit := self._commit(repo, revision)):
            return
        files = self.server.repos[repo][commit]
        if kind == "tree":
            inside = [path for path in files if path.startswith(folder + "/" if folder else "")]
            rest = {path: path[len(folder) + 1 if folder else 0 :] for path in inside}
            rows = [
                {
                    "type": "file",
                    "path": path,
                    "size": len(files[path]),
                    "oid": hashlib.sha1(files[path]).hexdigest(),
                }
                for path in inside
                if "/" not in rest[path]
            ]
            folders = {
                path[: -len(rest[path])] + rest[path].split("/")[0] for path in inside if "/" in rest[path]
            }
            rows += [
                {"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)
            ]
            if not rows:
                return self._missing("EntryNotFound")
            return self.send_json(rows)
        siblings = [{"rfilename": path} for path in files]
        self.send_json(
            {"id": repo, "sha": commit, "private": False, "tags": [], "downloads": 0, "siblings": siblings}
        )

    def _file(self, repo: str, revision: str, name: str):
        if not (commit := self._commit(repo, revision)):
            return
        content = self.server.repos[repo][commit].get(name)
        if content is None:
            return self._missing("EntryNotFound")
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if name in self.server.spoilt:
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
        status, total = 200, len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(match[1]), int(match[2] or total - 1) + 1
            content, status = content[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{total}"
        if self.command == "GET" and self.server.cut.get(name, 0) > 0:
            self.server.cut[name] -= 1
            self.send(content, status, headers, sent=len(content) // 2)
            self.close_connection = True
            return
        if self.command == "GET" and name in self.server.stalled:
            self.send(content, status, headers, sent=len(content) // 2)
            self.server.closed.wait()
            return
        self.send(content, status, headers)

    def _missing(self, code: str):
        self.send(b"{}", 404, {"X-Error-Code": code, "X-Error-Message": code})
