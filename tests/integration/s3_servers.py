"""Real S3 servers for tests: started on free ports of 127.0.0.1, stopped by their process id."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret123"
_START_SECONDS = 60


@dataclass
class Server:
    """A running server."""

    name: str
    endpoint_url: str
    process: subprocess.Popen
    log: Path

    @property
    def environment(self):
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def find_program(name):
    """Return the program's path: beside this Python, else on PATH, else None."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start_rclone(folder: Path, *, certificate=None) -> Server:
    log = folder / "rclone.log"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    command = [find_program("rclone"), "serve", "s3", "--addr", "127.0.0.1:0", "-v"]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--vfs-cache-mode", "off"]
    command += ["--config", str(folder / "rclone.conf")]
    if certificate:
        command += ["--cert", str(certificate[0]), "--key", str(certificate[1])]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, str(folder / "data")], stdout=output, stderr=output)
    pattern = re.compile(r"https?://127\.0\.0\.1:\d+")

    def ready():
        found = pattern.search(log.read_text(errors="replace"))
        return found and found[0]

    return Server("rclone", _wait(ready, process, log), process, log)


def start_seaweedfs(folder: Path) -> Server:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "weed.log"
    command = [find_program("weed"), "mini", f"-dir={folder}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", "-admin.ui=false", "-webdav=false"]
    ports = free_ports(10)
    for name in ("master", "volume", "filer", "s3", "admin"):
        command.append(f"-{name}.port={ports.pop()}")
        command.append(f"-{name}.port.grpc={ports.pop()}")
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    port = next(part for part in command if part.startswith("-s3.port=")).partition("=")[2]
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **keys}, cwd=folder
        )

    def ready():
        import urllib3

        try:
            status = urllib3.request("GET", endpoint, retries=False, timeout=2).status
        except urllib3.exceptions.HTTPError:
            return None
        return endpoint if status in (200, 403) else None

    return Server("seaweedfs", _wait(ready, process, log), process, log)


def _wait(ready, process, log):
    """Return what `ready` gives once it gives something."""
    end = time.monotonic() + _START_SECONDS
    pause = threading.Event()
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        value = ready()
        if value:
            return value
        pause.wait(0.1)
    process.kill()
    process.wait()
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
