"""The connections by which a process is known to live. About 4 s, to import torch in a second process."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from torch.distributed import FileStore, HashStore

from tests.conftest import ROOT
from training.parallel.links import Links, is_stopped

RANK = """
import sys, time
from torch.distributed import FileStore
from training.parallel.links import Links
link = Links(1, FileStore(sys.argv[1]))
link.connect()
print("connected", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def master(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")


def test_a_process_lives_also_where_it_is_stopped_and_until_it_is_killed(tmp_path):
    links = Links(0, FileStore(str(tmp_path / "store")))
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path / "store")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert links.lives(1) is None
    assert rank.stdout.readline() == "connected\n"
    assert links.lives(1)
    rank.send_signal(signal.SIGSTOP)
    while not is_stopped(rank.pid):
        time.sleep(0.01)
    assert links.lives(1)
    rank.kill()
    rank.wait()
    while links.lives(1):
        time.sleep(0.01)
    assert links.lives(1) is False
    assert not is_stopped(os.getpid())


def test_a_connection_that_is_not_a_ranks_is_dropped():
    store = HashStore()
    links = Links(0, store)
    _, port, _ = store.get("link").decode().split("|")
    with socket.create_connection(("localhost", int(port))) as stranger:
        stranger.sendall(bytes(16) + (1).to_bytes(4, "big"))
        assert links.lives(1) is None
        assert stranger.recv(1) == b""


def test_where_rank_0_cannot_be_reached_it_is_said(capsys):
    store = HashStore()
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        store.set("link", f"127.0.0.1|{unheard.getsockname()[1]}|{'00' * 16}")
        links = Links(1, store)
        links.connect()
    assert links.lives(0) is None
    assert "warning: rank 1 cannot connect to rank 0 (" in capsys.readouterr().err
