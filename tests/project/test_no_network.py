"""After the set-up no command needs the network: the demo runs where every address but this machine's is refused."""

import os
import subprocess
import sys
from pathlib import Path

REFUSE = """
import os, sys

def refuse(event, args):
    if event not in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        return
    address = args[-1] if event in ("socket.connect", "socket.sendto") else args
    host = address[0] if isinstance(address, tuple) else None  # the address of a Unix socket is a path
    if host not in (None, "localhost", "127.0.0.1", "::1"):
        with open(os.environ["REFUSED"], "a") as file:
            file.write(f"{event} {host}\\n")
        raise OSError(f"the test refuses {event} of {host}")

sys.addaudithook(refuse)
"""
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "WANDB_MODE")
"""What `make test` sets, and a user does not."""


def refusing(folder: Path, *command: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs Python with every address but this machine's refused. Returns the process and what was refused."""
    (folder / "sitecustomize.py").write_text(REFUSE)
    env = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    env |= {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]), "REFUSED": str(folder / "refused")}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
    return done, (folder / "refused").read_text().splitlines() if (folder / "refused").exists() else []


def test_the_demo_asks_no_other_machine(tmp_path: Path) -> None:
    done, refused = refusing(tmp_path, "-m", "cacheprobe", "demo", "--no-progress", "--out", "demo")
    assert done.returncode == 0, done.stderr
    assert refused == [] and (tmp_path / "demo" / "report.html").exists()
