"""A local HTTP server that answers as wandb's does, for the real `wandb` and `wandb-workspaces` clients.

    with WandbStub() as server:
        ... a subprocess with server.variables in its environment ...
        server.runs["8f3a12c4"].history

It knows one user, `someone`. With `stranger` it knows no key, with `leaves` it goes away once a run has begun, and
with `silent` it leaves requests unanswered, and counts them in `waiting`.
"""

import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.local_server import Handler, Server

_USER = {"id": "u", "entity": "someone", "username": "someone", "name": "Someone", "email": "", "flags": "{}"}
_TEAMS = {"admin": False, "teams": {"edges": [{"node": {"name": "someone"}}]}, "apiKeys": {"edges": []}}


@dataclass
class Run:
    """What was sent of a run."""

    facts: dict[str, Any] = field(default_factory=dict)  # groupName, displayName, tags, ...
    lines: dict[str, list[str]] = field(default_factory=dict)  # by file, as they stand there
    exit_code: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {key: each["value"] for key, each in json.loads(self.facts["config"]).items()}

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.get("wandb-history.jsonl", [])]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.lines["wandb-summary.json"][-1])


class WandbStub(Server):
    def __init__(self) -> None:
        super().__init__(_Handler)
        self.runs: dict[str, Run] = {}
        self.views: list[dict[str, Any]] = []
        self.alerts: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}  # of artifacts, by name
        self.sweep = ""  # the YAML of `wandb sweep`
        self.trials: list[dict[str, Any]] = []  # what `wandb agent` is told to run, one after the other
        self.stranger = self.leaves = self.silent = False
        self.waiting = 0
        self.variables = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}

    def answer(self, operation: str, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """The `data` of a GraphQL answer."""
        if operation == "Viewer":
            return {"viewer": _USER | _TEAMS}
        if operation == "RunResumeStatus":
            return {"model": self._known(given["name"])}
        if operation == "UpsertBucket":
            return {"upsertBucket": self._upsert(given)}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in given["files"]]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if operation == "UpsertSweep":
            self.sweep = given["config"]
            project = {"name": given["projectName"], "entity": {"name": "someone"}}
            return {
                "upsertSweep": {"sweep": {"name": "s", "project": project}, "configValidationWarnings": []}
            }
        if operation == "SweepWithRuns":
            return {"project": {"sweep": {"config": self.sweep, "runs": {"edges": []}}}}
        if operation == "CreateAgent":
            return {"createAgent": {"agent": {"id": "a"}}}
        if operation == "Heartbeat":
            return {"agentHeartbeat": {"agent": {"id": "a"}, "commands": json.dumps(self._orders(given))}}
        if operation == "NotifyScriptableRunAlert":
            self.alerts.append(given)
            return {"notifyScriptableRunAlert": {"success": True}}
        if operation == "ArtifactType":
            return {"project": {"artifact": None}}
        if operation == "CreateArtifact":
            artifact = {"id": "a", "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": artifact}}
        if operation == "CreateArtifactManifest":
            manifest = {"id": "m", "file": self._place("wandb_manifest.json")}
            return {"createArtifactManifest": {"artifactManifest": manifest}}
        if operation == "CreateArtifactFiles":
            nodes = [self._place(each["name"]) for each in given["input"]["artifactFiles"]]
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        if operation == "CommitArtifact":
            return {"commitArtifact": {"artifact": {"id": "a", "digest": ""}}}
        if "upsertView" in query:
            self.views.append(given | {"spec": json.loads(given["spec"])})
            view = {
                "id": "v",
                "type": "project-view",
                **{key: given[key] for key in ("name", "displayName", "spec")},
            }
            return {"upsertView": {"view": view, "inserted": True}}
        return {}

    def _orders(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        """For an agent: the next trial if it has none running, and to leave after the last one."""
        if json.loads(given["runState"]):
            return []
        if not self.trials:
            return [{"type": "exit"}]
        trial = self.trials.pop(0)
        arguments = {name: {"value": value} for name, value in trial.items()}
        return [
            {"type": "run", "run_id": f"trial{len(self.trials)}", "program": "train.py", "args": arguments}
        ]

    def _place(self, name: str) -> dict[str, Any]:
        """Where a client uploads a file of an artifact, to be found in `files` then."""
        return {
            "id": "f",
            "name": name,
            "displayName": name,
            "uploadUrl": f"{self.url}/upload/{name}",
            "uploadHeaders": [],
            "storagePath": name,
            "artifact": {"id": "a"},
        }

    def _known(self, name: str) -> dict[str, Any] | None:
        """An existing run, as a client that resumes it needs it."""
        if (run := self.runs.get(name)) is None:
            return None
        history, events = (run.lines.get(f"wandb-{kind}.jsonl", []) for kind in ("history", "events"))
        bucket = {
            "id": name,
            "name": name,
            "displayName": run.facts["displayName"],
            "config": run.facts["config"],
            "summaryMetrics": run.lines["wandb-summary.json"][-1],
            "tags": run.facts["tags"],
            "historyLineCount": len(history),
            "eventsLineCount": len(events),
            "logLineCount": len(run.lines.get("output.log", [])),
            "historyTail": json.dumps(history[-1:]),
            "eventsTail": json.dumps(events[-1:]),
            "wandbConfig": '{"t": 1}',  # it was begun, and not only announced
        }
        return {
            "id": "p",
            "name": run.facts["project"],
            "entity": {"id": "e", "name": "someone"},
            "bucket": bucket,
        }

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        new = given["name"] not in self.runs
        facts = self.runs.setdefault(given["name"], Run()).facts
        facts |= {key: value for key, value in given.items() if value is not None}
        project = {"id": "p", "name": facts["project"], "entity": {"id": "e", "name": "someone"}}
        bucket = {"id": given["name"], "name": given["name"], "displayName": facts["displayName"]}
        return {"inserted": new, "bucket": bucket | {"config": facts["config"], "project": project}}

    def stream(self, name: str, sent: dict[str, Any]) -> None:
        """Lines of a run's files, each file's from an offset on."""
        run = self.runs[name]
        for file, piece in sent.get("files", {}).items():
            lines = run.lines.setdefault(file, [])
            lines[piece["offset"] :] = piece["content"]
        run.exit_code = sent.get("exitcode", run.exit_code)


class _Handler(Handler):
    server: WandbStub

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/graphql":
            if self.server.silent:
                self.server.waiting += 1
                threading.Event().wait(60)
                self.close_connection = True
                return None
            if self.server.stranger:
                return self.send_json({"errors": [{"message": "user is not logged in"}]}, 401)
            asked = json.loads(body)
            named = re.search(
                r"(?:query|mutation) (\w+)", asked["query"]
            )  # not every client sends operationName
            operation, given = asked.get("operationName") or (named or " ")[1], asked.get("variables") or {}
            self.send_json({"data": self.server.answer(operation, asked["query"], given)})
            if operation == "UpsertBucket" and self.server.leaves:
                self.server.leaves = False
                threading.Thread(target=self.server.leave).start()
                self.close_connection = True
        elif self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(body))
            self.send_json({"exitcode": None, "limits": {}})
        else:
            self.send_json({})

    def do_PUT(self) -> None:
        self.server.files[self.path.removeprefix("/upload/")] = self.body()
        self.send_json({})
